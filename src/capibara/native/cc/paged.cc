// Attention to keys and values in pages as XLA sees it: shapes are read from the buffers, and checked.
#include "paged.h"

#include <string>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara attention to pages: ") + why);
}

bool is_number(const ffi::AnyBuffer& x) {
  return x.dimensions().size() == 4 && (x.element_type() == ffi::F32 || x.element_type() == ffi::BF16);
}

// query [batch, fresh, heads, dim], keys and values [pages, page_size, kv_heads, width], page_table [batch, table],
// lengths [batch], sinks [heads] or [0]; out [batch, fresh, heads, value_dim].
ffi::Error paged(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                 ffi::AnyBuffer page_table, ffi::AnyBuffer lengths, ffi::AnyBuffer sinks,
                 ffi::Result<ffi::AnyBuffer> out, int64_t window, float scale, float softcap) {
  if (!is_number(query) || !is_number(keys) || !is_number(values) || !is_number(*out) ||
      out->element_type() != query.element_type() || page_table.element_type() != ffi::S32 ||
      lengths.element_type() != ffi::S32 || page_table.dimensions().size() != 2 || lengths.dimensions().size() != 1 ||
      sinks.element_type() != ffi::F32 || sinks.dimensions().size() != 1)
    return refuse("the arrays' types do not fit");
  const auto q = query.dimensions(), k = keys.dimensions(), v = values.dimensions(), o = out->dimensions();
  capibara::Paged p{};
  p.batch = q[0], p.fresh = q[1], p.heads = q[2], p.dim = q[3];
  p.pages = k[0], p.page_size = k[1], p.kv_heads = k[2], p.key_width = k[3];
  p.value_width = v[3], p.value_dim = o[3], p.table = page_table.dimensions()[1];
  if (v[0] != p.pages || v[1] != p.page_size || v[2] != p.kv_heads || o[0] != p.batch || o[1] != p.fresh ||
      o[2] != p.heads || page_table.dimensions()[0] != p.batch || lengths.dimensions()[0] != p.batch ||
      p.key_width < p.dim || p.value_width < p.value_dim || p.kv_heads == 0 || p.heads % p.kv_heads != 0 ||
      p.pages == 0 || p.page_size == 0 || window < 0 ||
      (sinks.dimensions()[0] != 0 && sinks.dimensions()[0] != p.heads))
    return refuse("the arrays' shapes do not fit together");
  p.window = window, p.scale = scale, p.softcap = softcap;
  p.narrow_query = query.element_type() == ffi::BF16;
  p.narrow_key = keys.element_type() == ffi::BF16, p.narrow_value = values.element_type() == ffi::BF16;
  p.query = query.untyped_data(), p.keys = keys.untyped_data(), p.values = values.untyped_data();
  p.page_table = static_cast<const int32_t*>(page_table.untyped_data());
  p.lengths = static_cast<const int32_t*>(lengths.untyped_data());
  p.sinks = sinks.dimensions()[0] == 0 ? nullptr : static_cast<const float*>(sinks.untyped_data());
  p.out = out->untyped_data();
  const auto& kernels = *capibara::isa().paged;
  const auto work = [&](int64_t item, float* scratch) { kernels.attend(p, item, scratch); };
  if (!capibara::Crew::run(pool, kernels.items(p), kernels.scratch(p), work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara attention to pages: out of memory");
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_paged_attention(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_paged_attention, paged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));
