// The max-plus product as XLA sees it: shapes are read from the buffers, and checked.
#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "tropical.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using capibara::Tropical;

namespace {

// Rows and columns are the last two axes; all before are the batch (`vmap` adds some), the same in every array.
bool measure(const ffi::AnyBuffer::Dimensions& dims, int64_t* batch, int64_t* rows, int64_t* columns) {
  const size_t rank = dims.size();
  if (rank < 2) return false;
  *batch = 1;
  for (size_t i = 0; i + 2 < rank; ++i) *batch *= dims[i];
  *rows = dims[rank - 2];
  *columns = dims[rank - 1];
  return true;
}

ffi::Error product(ffi::ThreadPool& pool, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, ffi::AnyBuffer& out,
                   ffi::AnyBuffer* index) {
  Tropical p{};
  int64_t batch[3], depth, rows, columns;
  if (!measure(a.dimensions(), &p.batch, &p.rows, &p.depth) ||
      !measure(b.dimensions(), &batch[0], &depth, &p.columns) ||
      !measure(out.dimensions(), &batch[1], &rows, &columns) || batch[0] != p.batch || batch[1] != p.batch ||
      depth != p.depth || rows != p.rows || columns != p.columns || depth > INT32_MAX)
    return ffi::Error::InvalidArgument("capibara max-plus: the arrays' shapes do not fit together");
  const bool wide = a.element_type() == ffi::F64;
  if ((!wide && a.element_type() != ffi::F32) || b.element_type() != a.element_type() ||
      out.element_type() != a.element_type())
    return ffi::Error::InvalidArgument("capibara max-plus: the arrays must all be float32 or all float64");
  if (index != nullptr &&
      (index->element_type() != ffi::S32 || index->element_count() != out.element_count()))
    return ffi::Error::InvalidArgument("capibara max-plus: the indices must be int32, one for each result");
  p.threads = std::max<int64_t>(pool.num_threads(), 1);
  p.a = a.untyped_data();
  p.b = b.untyped_data();
  p.out = out.untyped_data();
  p.index = index == nullptr ? nullptr : static_cast<int32_t*>(index->untyped_data());
  int32_t some_negative = 0;
  p.some_negative = &some_negative;
  const auto& kernels = *capibara::isa().tropical;
  const auto work = wide ? kernels.float64 : kernels.float32;
  if (!capibara::Crew::run(pool, kernels.items(p), kernels.scratch(p, wide ? 8 : 4),
                           [p, work](int64_t item, float* scratch) { work(p, item, scratch); }))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara max-plus: out of memory");
  return ffi::Error::Success();
}

ffi::Error value(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out) {
  return product(pool, a, b, *out, nullptr);
}

ffi::Error both(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out,
                ffi::Result<ffi::AnyBuffer> index) {
  return product(pool, a, b, *out, &*index);
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_max_plus(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_max_plus_argmax(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    capibara_max_plus, value,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_max_plus_argmax, both,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
