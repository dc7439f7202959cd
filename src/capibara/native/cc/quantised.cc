// Products with a matrix in codes as XLA sees them: shapes are read from the buffers, and checked.
#include "quantised.h"

#include <algorithm>
#include <string>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara product with codes: ") + why);
}

bool is_matrix(const ffi::AnyBuffer& x) { return x.dimensions().size() == 2; }

// x [count, inner] (across: [count, rows]), codes, scales [rows, groups]; levels [16] of codes of four bits, else none; a
// table of 256 if scales are codes themselves, else none.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                   ffi::AnyBuffer levels, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out, int64_t inner,
                   int64_t group, int64_t across) {
  if (!is_matrix(x) || !is_matrix(codes) || !is_matrix(scales) || !is_matrix(*out) || group < 1 || inner < 0)
    return refuse("the arrays must have two axes, and groups a number");
  capibara::CodesProduct p{};
  p.w.four = codes.element_type() == ffi::U8;
  if ((!p.w.four && codes.element_type() != ffi::S8) || x.element_type() != ffi::F32 ||
      out->element_type() != ffi::F32 || table.element_type() != ffi::F32 || levels.element_type() != ffi::F32)
    return refuse("the arrays' types do not fit");
  const bool coded = scales.element_type() == ffi::U8;
  if (!coded && scales.element_type() != ffi::F32) return refuse("scales must be float32 or uint8");
  p.w.rows = codes.dimensions()[0], p.w.width = codes.dimensions()[1];
  p.w.inner = inner, p.w.group = group, p.w.groups = (inner + group - 1) / group;
  p.count = x.dimensions()[0], p.across = across != 0;
  if (p.w.width != (p.w.four ? (inner + 1) / 2 : inner) || scales.dimensions()[0] != p.w.rows ||
      scales.dimensions()[1] != p.w.groups || x.dimensions()[1] != (across ? p.w.rows : inner) ||
      out->dimensions()[0] != p.count || out->dimensions()[1] != (across ? inner : p.w.rows) ||
      table.element_count() != (coded ? 256u : 0u) || levels.element_count() != (p.w.four ? 16u : 0u))
    return refuse("the arrays' shapes do not fit together");
  p.w.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.w.scales = coded ? nullptr : static_cast<const float*>(scales.untyped_data());
  p.w.scale_codes = coded ? static_cast<const uint8_t*>(scales.untyped_data()) : nullptr;
  p.w.table = static_cast<const float*>(table.untyped_data());
  p.w.levels = static_cast<const float*>(levels.untyped_data());
  p.x = static_cast<const float*>(x.untyped_data());
  p.out = static_cast<float*>(out->untyped_data());
  p.threads = std::max<int64_t>(pool.num_threads(), 1);
  if (p.w.rows == 0 || inner == 0) {
    std::fill_n(p.out, out->element_count(), 0.0f);
    return ffi::Error::Success();
  }
  const auto& kernels = *capibara::isa().quantised;
  const size_t bytes = (static_cast<size_t>(kernels.packed(p)) * sizeof(float) + 63) / 64 * 64;
  const std::unique_ptr<float, decltype(&std::free)> packed(
      static_cast<float*>(bytes == 0 ? nullptr : std::aligned_alloc(64, bytes)), &std::free);
  const auto exhausted = [] { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara: out of memory"); };
  if (bytes != 0 && packed == nullptr) return exhausted();
  p.packed = packed.get();
  using capibara::Crew;
  const bool fine = Crew::run(pool, kernels.pack_items(p), 1, [&](int64_t i, float*) { kernels.pack(p, i); }) &&
                    Crew::run(pool, kernels.items(p), kernels.scratch(p),
                              [&](int64_t i, float* scratch) { kernels.multiply(p, i, scratch); }) &&
                    Crew::run(pool, kernels.finish_items(p), 1, [&](int64_t i, float*) { kernels.finish(p, i); });
  return fine ? ffi::Error::Success() : exhausted();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_codes_product(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_codes_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("inner")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("across"));
