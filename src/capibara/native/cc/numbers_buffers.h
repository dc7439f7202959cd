// Buffers of XLA as matrices.
#pragma once

#include "numbers.h"
#include "xla/ffi/api/ffi.h"

namespace capibara {

// False where they are neither float32 nor bfloat16.
inline bool read_numbers(const xla::ffi::AnyBuffer& from, Numbers* to) {
  const bool narrow = from.element_type() == xla::ffi::BF16;
  if (!narrow && from.element_type() != xla::ffi::F32) return false;
  *to = {from.untyped_data(), narrow};
  return true;
}

struct MatrixOf {
  Numbers numbers;
  int64_t rows, columns;
  bool panels;
};

// float32 or bfloat16: two axes, or three where it lies in panels. False where it is none.
inline bool read_matrix(const xla::ffi::AnyBuffer& from, MatrixOf* to) {
  const auto shape = from.dimensions();
  if (!read_numbers(from, &to->numbers)) return false;
  to->panels = shape.size() == 3;
  if (to->panels) {
    if (shape[2] != kPanelColumns) return false;
    to->rows = shape[1], to->columns = shape[0] * kPanelColumns;
    return true;
  }
  if (shape.size() != 2) return false;
  to->rows = shape[0], to->columns = shape[1];
  return true;
}

}  // namespace capibara
