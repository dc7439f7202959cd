// Products with matrices in codes as XLA sees them: shapes are read from the buffers, and checked.
#include "quantised.h"

#include <algorithm>
#include <string>
#include <vector>

#include "codes_buffers.h"
#include "isa.h"
#include "parallel.h"
#include "several.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara product with codes: ") + why);
}

constexpr size_t kSmall = 1 << 15;  // numbers that are packed before another thread is awake

using capibara::CodesProduct;

// The product of x [count, inner] (across: [count, rows]) with one matrix, or what is wrong.
const char* describe(CodesProduct& p, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                     ffi::AnyBuffer levels, ffi::AnyBuffer table, ffi::AnyBuffer out, int64_t inner, int64_t group,
                     bool across) {
  const char* const why = capibara::read_codes(p.w, codes, scales, levels, table, inner, group);
  if (why != nullptr) return why;
  if (x.element_type() != ffi::F32 || out.element_type() != ffi::F32) return "the arrays' types do not fit";
  if (x.dimensions().size() != 2 || out.dimensions().size() != 2) return "the arrays must have two axes";
  p.count = x.dimensions()[0], p.across = across;
  if (x.dimensions()[1] != (across ? p.w.rows : inner) || out.dimensions()[0] != p.count ||
      out.dimensions()[1] != (across ? inner : p.w.rows))
    return "the arrays' shapes do not fit together";
  p.x = static_cast<const float*>(x.untyped_data());
  p.out = static_cast<float*>(out.untyped_data());
  return nullptr;
}

// x; of each matrix codes, scales, levels and table; a result of each.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays, ffi::RemainingRets results,
                   ffi::Span<const int64_t> inner, ffi::Span<const int64_t> group, int64_t across) {
  const size_t count = results.size();
  if (count == 0 || arrays.size() != 4 * count || inner.size() != count || group.size() != count)
    return refuse("each result needs four arrays, a length and a group");
  std::vector<CodesProduct> products;
  for (size_t i = 0; i < count; ++i) {
    const auto codes = arrays.get<ffi::AnyBuffer>(4 * i), scales = arrays.get<ffi::AnyBuffer>(4 * i + 1);
    const auto levels = arrays.get<ffi::AnyBuffer>(4 * i + 2), table = arrays.get<ffi::AnyBuffer>(4 * i + 3);
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!codes.has_value() || !scales.has_value() || !levels.has_value() || !table.has_value() || !out.has_value())
      return refuse("the arrays' types do not fit");
    CodesProduct p{};
    const char* const why =
        describe(p, x, *codes, *scales, *levels, *table, **out, inner[i], group[i], across != 0);
    if (why != nullptr) return refuse(why);
    p.threads = std::max<int64_t>(pool.num_threads(), 1);
    if (p.w.rows == 0 || p.w.inner == 0)
      std::fill_n(p.out, (*out)->element_count(), 0.0f);
    else
      products.push_back(p);
  }
  if (products.empty()) return ffi::Error::Success();
  const auto& kernels = *capibara::isa().quantised;
  capibara::Room room;
  for (auto& p : products) room.add(&p.room, kernels.room(p));
  const auto exhausted = [] { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara: out of memory"); };
  if (!room.take()) return exhausted();
  using capibara::Crew;
  for (const auto& p : products) {
    const int64_t items = kernels.pack_items(p);
    if (x.element_count() <= kSmall) {
      for (int64_t i = 0; i < items; ++i) kernels.pack(p, i);
    } else if (!Crew::run(pool, items, 1, [&](int64_t i, float*) { kernels.pack(p, i); })) {
      return exhausted();
    }
  }
  capibara::Several<CodesProduct> all(products, kernels.items, kernels.block);
  int64_t scratch = 0;
  for (const auto& p : products) scratch = std::max(scratch, kernels.scratch(p));
  const auto work = [&](int64_t item, float* own) { all.run(item, own, kernels.multiply, kernels.finish); };
  return Crew::run(pool, all.items(), scratch, work) ? ffi::Error::Success() : exhausted();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_codes_product(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_codes_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("inner")
                                  .Attr<ffi::Span<const int64_t>>("group")
                                  .Attr<int64_t>("across"));
