// Products of a few rows with a matrix: what the kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

#include "numbers.h"

namespace capibara {

// out[i, j] = sum over k of x[i, k] * w[k, j].
struct ThinProduct {
  int64_t rows, inner, columns;
  int64_t threads;   // that share the items
  const float* x;    // [rows, inner]
  Numbers w;         // [inner, columns], or [columns, inner] if by_column, or in panels
  bool by_column, panels;
  float* out;        // [rows, columns]
  float* room;       // as large as `room` says, begins a line of the cache
};

// An item is a piece of work that one thread does alone, with so many floats of scratch. Items come in blocks of so
// many, one after the other; when all of a block are done, it is finished.
struct ThinKernels {
  int64_t (*items)(const ThinProduct&);
  int64_t (*scratch)(const ThinProduct&);  // floats
  int64_t (*room)(const ThinProduct&);     // floats
  int64_t (*block)(const ThinProduct&);    // items; 0: nothing has to be finished
  void (*multiply)(const ThinProduct&, int64_t item, float* scratch);
  void (*finish)(const ThinProduct&, int64_t block);
  // Columns of a row of the result, instead of `finish`.
  void (*finish_columns)(const ThinProduct&, int64_t row, int64_t first, int64_t count);
  // Brings a part of what an item reads of the matrix nearer, from the first on; whether there are more parts.
  bool (*fetch)(const ThinProduct&, int64_t item, int64_t part);
  // Rows of other arrays between products: see thin_rows.h.
  void (*norm)(const float* x, const float* scale, float epsilon, int64_t width, float* out);
  void (*add)(const float* a, const float* b, int64_t count, float* out);
  void (*gate)(const float* a, const float* b, int64_t count, float* out);
};

}  // namespace capibara
