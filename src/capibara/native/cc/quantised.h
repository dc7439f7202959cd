// Products with a matrix in codes: what the kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// Laid out as in codecs/fixed_native.py. A matrix [rows, inner], row by row: codes of eight bits, or of four, two to a
// byte and the first in the lower half.
// An entry is level(code) * scale(group); the last group of a row may be shorter.
struct Codes {
  int64_t rows, inner, group;
  int64_t width, groups;  // bytes and scales of a row
  int32_t four;
  const uint8_t* codes;
  const float* scales;         // [rows, groups], or null:
  const uint8_t* scale_codes;  // [rows, groups], places in `table`
  const float* table;          // [256]
  const float* levels;         // [16], of four bits
};

// out[n, r] = sum_k x[n, k] W[r, k]; across, out[n, k] = sum_r x[n, r] W[r, k].
struct CodesProduct {
  Codes w;
  bool across;
  int64_t count;  // of vectors
  int64_t threads;
  const float* x;
  float* out;
  float* room;  // as large as `room` says, begins a line of the cache
};

constexpr int64_t kFewVectors = 8;  // and fewer: nothing is packed. FEW in ops/linalg/quantised_native.py

// Every item of pack, then every item of multiply. These come in blocks of so many, one after the other; when all of a
// block are done, it is finished. An item's scratch is its thread's.
struct QuantisedKernels {
  int64_t (*room)(const CodesProduct&);  // floats
  int64_t (*pack_items)(const CodesProduct&);
  void (*pack)(const CodesProduct&, int64_t item);
  int64_t (*items)(const CodesProduct&);
  int64_t (*scratch)(const CodesProduct&);  // floats
  void (*multiply)(const CodesProduct&, int64_t item, float* scratch);
  int64_t (*block)(const CodesProduct&);  // items; 0: nothing has to be finished
  void (*finish)(const CodesProduct&, int64_t block);
  // Of few vectors: columns of the result of one of them, instead of `finish`; `first` and `count` are multiples of 64,
  // or the row ends there.
  void (*finish_columns)(const CodesProduct&, int64_t row, int64_t first, int64_t count);
  // Brings a part of what an item reads of the matrix nearer, from the first on; whether there are more parts.
  bool (*fetch)(const CodesProduct&, int64_t item, int64_t part);
  // Columns `begin` (a multiple of 64) to `end` of rows `first` to `last` as numbers, those beyond ±top as that.
  void (*decode)(const Codes&, int64_t first, int64_t last, int64_t begin, int64_t end, float top, float* out);
};

}  // namespace capibara
