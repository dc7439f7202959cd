// Products of groups of rows: what the kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

#include "numbers.h"

namespace capibara {

// c[i, j] = sum over k of a[i, k] * b[k, j] for a block of a product; 0 where depth is 0, or nothing is added.
struct GroupedBlock {
  int64_t rows, columns, depth;
  const float* a;  // [rows, depth], or [depth, rows] if a_by_depth; a_step numbers from a row to the next
  int64_t a_step;
  bool a_by_depth;
  Numbers b;  // [depth, columns], or [columns, depth] if b_by_column
  int64_t b_step;
  bool b_by_column;
  float* c;  // [rows, columns]
  int64_t c_step;
  bool add = false;                      // to what c holds
  const GroupedBlock* beside = nullptr;  // another product of the same rows of a, with the same depth, or null
  const GroupedBlock* next = nullptr;    // what the same thread computes after it, or null
  // Where b lies in panels: numbers from one to the next, else 0; and which of their columns is the first of b.
  int64_t b_panel = 0, b_first = 0;

  // Leaves out the columns before the j-th.
  CAPIBARA_IN_LINE void skip(int64_t j) {
    if (b_panel != 0)
      b_first += j;
    else
      b += b_by_column ? j * b_step : j;
    c += j;
  }
  // The k-th row of b from column j on, up to the end of its panel.
  CAPIBARA_IN_LINE Numbers in_panel(int64_t k, int64_t j) const {
    const int64_t column = b_first + j;
    return b + (column / kPanelColumns * b_panel + k * kPanelColumns + column % kPanelColumns);
  }
};

struct GroupedKernels {
  int64_t most_rows, most_columns;  // of a block: rows of more are dealt with in parts
  int64_t unit_rows, unit_columns;  // of a register tile
  int64_t scratch;  // floats
  void (*multiply)(const GroupedBlock&, float* scratch);
};

}  // namespace capibara
