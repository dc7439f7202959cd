// Products of a few rows with a matrix as XLA sees them: shapes are read from the buffers, and checked.
#include "thin.h"

#include <algorithm>
#include <string>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara product of few rows: ") + why);
}

bool is_matrix(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 && x.dimensions().size() == 2; }

// x [rows, inner], w [inner, columns] or, transposed, [columns, inner]; out [rows, columns].
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out,
                   int64_t transposed) {
  if (!is_matrix(x) || !is_matrix(w) || !is_matrix(*out)) return refuse("the arrays must be float32 with two axes");
  capibara::ThinProduct p{};
  p.rows = x.dimensions()[0], p.inner = x.dimensions()[1], p.columns = out->dimensions()[1];
  p.by_column = transposed != 0;
  if (out->dimensions()[0] != p.rows || w.dimensions()[p.by_column ? 1 : 0] != p.inner ||
      w.dimensions()[p.by_column ? 0 : 1] != p.columns)
    return refuse("the arrays' shapes do not fit together");
  p.threads = std::max<int64_t>(pool.num_threads(), 1);
  p.x = static_cast<const float*>(x.untyped_data());
  p.w = static_cast<const float*>(w.untyped_data());
  p.out = static_cast<float*>(out->untyped_data());
  const auto& kernels = *capibara::isa().thin;
  const auto work = [&](int64_t item, float* scratch) { kernels.multiply(p, item, scratch); };
  if (!capibara::Crew::run(pool, kernels.items(p), kernels.scratch(p), work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara product of few rows: out of memory");
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_thin_product(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_thin_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("transposed"));
