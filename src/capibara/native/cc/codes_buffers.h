// A matrix in codes as XLA hands it over.
#pragma once

#include "quantised.h"
#include "xla/ffi/api/ffi.h"

namespace capibara {

// Fills in a matrix, or says what is wrong: codes, scales [rows, groups], levels [16] of codes of four bits, else none;
// a table of 256 if scales are codes themselves, else none.
inline const char* read_codes(Codes& w, ::xla::ffi::AnyBuffer codes, ::xla::ffi::AnyBuffer scales,
                              ::xla::ffi::AnyBuffer levels, ::xla::ffi::AnyBuffer table, int64_t inner, int64_t group) {
  namespace ffi = ::xla::ffi;
  if (codes.dimensions().size() != 2 || scales.dimensions().size() != 2 || group < 1 || inner < 0)
    return "the arrays must have two axes, and groups a number";
  w.four = codes.element_type() == ffi::U8;
  const bool coded = scales.element_type() == ffi::U8;
  if (!coded && scales.element_type() != ffi::F32) return "scales must be float32 or uint8";
  if ((!w.four && codes.element_type() != ffi::S8) || table.element_type() != ffi::F32 ||
      levels.element_type() != ffi::F32)
    return "the arrays' types do not fit";
  w.rows = codes.dimensions()[0], w.width = codes.dimensions()[1];
  // Without a sum that the largest numbers would overflow.
  w.inner = inner, w.group = group, w.groups = inner / group + (inner % group != 0);
  if (w.width != (w.four ? inner / 2 + inner % 2 : inner) || scales.dimensions()[0] != w.rows ||
      scales.dimensions()[1] != w.groups || table.element_count() != (coded ? 256u : 0u) ||
      levels.element_count() != (w.four ? 16u : 0u))
    return "the arrays' shapes do not fit together";
  w.codes = static_cast<const uint8_t*>(codes.untyped_data());
  w.scales = coded ? nullptr : static_cast<const float*>(scales.untyped_data());
  w.scale_codes = coded ? static_cast<const uint8_t*>(scales.untyped_data()) : nullptr;
  w.table = static_cast<const float*>(table.untyped_data());
  w.levels = static_cast<const float*>(levels.untyped_data());
  return nullptr;
}

}  // namespace capibara
