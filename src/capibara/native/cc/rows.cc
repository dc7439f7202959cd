// Rows written into an array where it stands, as XLA sees it: shapes are read from the buffers, and checked.
#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) { return ffi::Error::InvalidArgument(std::string("capibara rows: ") + why); }

// array [d0, d1, …] of bfloat16 or float16; where int32 [count, axes]: the place of each row along the first axes, which
// is not written if that is outside; rows [count, …]; out is the array.
ffi::Error write(ffi::AnyBuffer array, ffi::AnyBuffer where, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> out) {
  const auto type = array.element_type();
  if ((type != ffi::BF16 && type != ffi::F16) || where.element_type() != ffi::S32 || where.dimensions().size() != 2 ||
      rows.element_type() != type || out->element_type() != type)
    return refuse("the arrays' types do not fit");
  const auto sizes = array.dimensions();
  const int64_t count = where.dimensions()[0], axes = where.dimensions()[1];
  if (axes < 1 || axes > static_cast<int64_t>(sizes.size())) return refuse("there are no such axes");
  int64_t places = 1;
  for (int64_t i = 0; i < axes; ++i) places *= sizes[i];
  const size_t bytes = places == 0 ? 0 : array.size_bytes() / static_cast<size_t>(places);
  if (out->size_bytes() != array.size_bytes() || (places != 0 && rows.size_bytes() != bytes * count))
    return refuse("the arrays' shapes do not fit together");
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != array.untyped_data()) std::memcpy(to, array.untyped_data(), array.size_bytes());
  const auto* from = static_cast<const char*>(rows.untyped_data());
  const auto* place = static_cast<const int32_t*>(where.untyped_data());
  for (int64_t row = 0; row < count; ++row, from += bytes) {
    int64_t at = 0;
    bool inside = true;
    for (int64_t i = 0; i < axes; ++i, ++place) {
      inside = inside && *place >= 0 && *place < sizes[i];
      if (inside) at = at * sizes[i] + *place;
    }
    if (inside) std::memcpy(to + at * bytes, from, bytes);
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_write_rows(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_write_rows, write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
