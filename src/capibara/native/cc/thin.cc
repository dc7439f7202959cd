// Products of a few rows with matrices as XLA sees them: shapes are read from the buffers, and checked.
#include "thin.h"

#include <algorithm>
#include <string>
#include <vector>

#include "isa.h"
#include "numbers_buffers.h"
#include "parallel.h"
#include "several.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara product of few rows: ") + why);
}

bool is_matrix(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 && x.dimensions().size() == 2; }

// x [rows, inner]; of each matrix w [inner, columns], in panels or, if it has two axes and is transposed, [columns,
// inner], float32 or bfloat16; out [rows, columns].
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices, ffi::RemainingRets results,
                   int64_t transposed) {
  if (!is_matrix(x) || matrices.size() != results.size() || matrices.size() == 0)
    return refuse("the arrays must be float32 with two axes, and as many results as matrices");
  const auto& kernels = *capibara::isa().thin;
  std::vector<capibara::ThinProduct> products;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto w = matrices.get<ffi::AnyBuffer>(i);
    auto out = results.get<ffi::AnyBuffer>(i);
    capibara::ThinProduct p{};
    capibara::MatrixOf matrix;
    if (!w.has_value() || !out.has_value() || !capibara::read_matrix(*w, &matrix) || !is_matrix(**out))
      return refuse("the arrays must be float32 with two axes; matrices may be bfloat16, and lie in panels");
    p.w = matrix.numbers, p.panels = matrix.panels;
    p.rows = x.dimensions()[0], p.inner = x.dimensions()[1], p.columns = (*out)->dimensions()[1];
    p.by_column = transposed != 0 && !p.panels;
    if ((*out)->dimensions()[0] != p.rows || (p.by_column ? matrix.columns : matrix.rows) != p.inner ||
        (p.by_column ? matrix.rows : matrix.columns) != p.columns)
      return refuse("the arrays' shapes do not fit together");
    p.threads = std::max<int64_t>(pool.num_threads(), 1);
    p.x = static_cast<const float*>(x.untyped_data());
    p.out = static_cast<float*>((*out)->untyped_data());
    products.push_back(p);
  }
  capibara::Several<capibara::ThinProduct> all(products, kernels.items, kernels.block);
  capibara::Room room;
  for (auto& p : products) room.add(&p.room, kernels.room(p));
  int64_t scratch = 0;
  for (const auto& p : products) scratch = std::max(scratch, kernels.scratch(p));
  const auto work = [&](int64_t item, float* own) { all.run(item, own, kernels.multiply, kernels.finish); };
  if (!room.take() || !capibara::Crew::run(pool, all.items(), scratch, work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara product of few rows: out of memory");
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_thin_product(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_thin_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("transposed"));
