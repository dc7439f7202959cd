// Buffers of XLA as numbers of a matrix.
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

}  // namespace capibara
