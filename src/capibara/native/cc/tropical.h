// What the max-plus kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// out[b, i, j] = max over k of a[b, i, k] + b[b, k, j], and the lowest k that reaches it; all arrays contiguous.
struct Tropical {
  int64_t batch, rows, depth, columns;
  int64_t threads;  // that share the items
  const void *a, *b;
  void* out;
  int32_t* index;  // null when it is not asked for
  int32_t* some_negative;  // zero at first; set by an item whose comparison of integers failed for this reason
};

struct TropicalKernels {
  int64_t (*items)(const Tropical&);
  int64_t (*scratch)(const Tropical&, int64_t bytes);  // in floats, for entries of so many bytes
  void (*float32)(const Tropical&, int64_t item, float* scratch);
  void (*float64)(const Tropical&, int64_t item, float* scratch);
};

}  // namespace capibara
