// The attention kernels as XLA sees them: shapes are read from the buffers, and checked.
#include <algorithm>

#include "attention.h"
#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using capibara::Attention;
using capibara::Steps;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

// [..., heads, length, dim] or [..., length, heads, dim]; all axes before are the batch (`vmap` adds some).
struct Sizes {
  int64_t batch = 1, heads = 0, length = 0, dim = 0;
  Steps steps{};
};

bool measure(const Floats& x, int64_t layout, Sizes* s) {
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  if (rank < 4) return false;
  for (size_t i = 0; i + 3 < rank; ++i) s->batch *= dims[i];
  const bool heads_first = layout == 0;
  s->heads = dims[heads_first ? rank - 3 : rank - 2];
  s->length = dims[heads_first ? rank - 2 : rank - 3];
  s->dim = dims[rank - 1];
  s->steps.batch = s->heads * s->length * s->dim;
  s->steps.head = heads_first ? s->length * s->dim : s->dim;
  s->steps.position = heads_first ? s->dim : s->heads * s->dim;
  return true;
}

bool alike(const Floats& x, const Floats& y) {
  const auto a = x.dimensions(), b = y.dimensions();
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

ffi::Error describe(const Floats& query, const Floats& key, const Floats& value, const Floats& out, int64_t stats,
                    int64_t layout, int64_t left, int64_t right, float scale, Attention* a) {
  Sizes q, k, v, o;
  if (!measure(query, layout, &q) || !measure(key, layout, &k) || !measure(value, layout, &v) ||
      !measure(out, layout, &o))
    return ffi::Error::InvalidArgument("capibara attention: every array needs four axes or more");
  if (k.batch != q.batch || v.batch != q.batch || o.batch != q.batch || k.dim != q.dim || v.heads != k.heads ||
      v.length != k.length || o.heads != q.heads || o.length != q.length || o.dim != v.dim || k.heads == 0 ||
      q.heads % k.heads != 0 || stats != q.batch * q.heads * q.length || left < 0 || right < 0)
    return ffi::Error::InvalidArgument("capibara attention: the arrays' shapes do not fit together");
  *a = Attention{};
  a->batch = q.batch;
  a->heads = q.heads;
  a->kv_heads = k.heads;
  a->q_len = q.length;
  a->kv_len = k.length;
  a->dim = q.dim;
  a->value_dim = v.dim;
  // Beyond the arrays' ends any limit is the same; bounded, sums of positions and limits cannot overflow.
  const int64_t far = q.length + k.length;
  a->left = std::min(left, far);
  a->right = std::min(right, far);
  a->scale = scale;
  a->query_steps = q.steps;
  a->key_steps = k.steps;
  a->value_steps = v.steps;
  a->out_steps = o.steps;
  a->query = query.typed_data();
  a->key = key.typed_data();
  a->value = value.typed_data();
  return ffi::Error::Success();
}

ffi::Error done(bool enough_memory) {
  if (enough_memory) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara attention: no memory for a thread's scratch");
}

ffi::Error forward(ffi::ThreadPool pool, Floats query, Floats key, Floats value, ffi::Result<Floats> out,
                   ffi::Result<Floats> stat, int64_t layout, int64_t left, int64_t right, float scale) {
  Attention a;
  const ffi::Error bad =
      describe(query, key, value, *out, stat->element_count(), layout, left, right, scale, &a);
  if (bad.failure()) return bad;
  a.out = out->typed_data();
  a.stat = stat->typed_data();
  a.threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto& kernels = *capibara::isa().attention;
  return done(capibara::Crew::run(pool, kernels.forward_items(a), kernels.forward_scratch(a),
                                  [&](int64_t item, float* scratch) { kernels.forward(a, item, scratch); }));
}

ffi::Error backward(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats out, Floats stat,
                    Floats out_grad, ffi::Result<Floats> query_grad, ffi::Result<Floats> key_grad,
                    ffi::Result<Floats> value_grad, int64_t layout, int64_t left, int64_t right, float scale) {
  Attention a;
  const ffi::Error bad = describe(query, key, value, out, stat.element_count(), layout, left, right, scale, &a);
  if (bad.failure()) return bad;
  if (!alike(out_grad, out) || !alike(*query_grad, query) || !alike(*key_grad, key) || !alike(*value_grad, value))
    return ffi::Error::InvalidArgument("capibara attention: a gradient has another shape than its array");
  a.out = out.typed_data();
  a.stat = stat.typed_data();
  a.out_grad = out_grad.typed_data();
  a.query_grad = query_grad->typed_data();
  a.key_grad = key_grad->typed_data();
  a.value_grad = value_grad->typed_data();
  a.threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto& kernels = *capibara::isa().attention;
  return done(capibara::Crew::run(pool, kernels.backward_items(a), kernels.backward_scratch(a),
                                  [&](int64_t item, float* scratch) { kernels.backward(a, item, scratch); }));
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_attention_forward(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_attention_backward(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_attention_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("layout")
                                  .Attr<int64_t>("left")
                                  .Attr<int64_t>("right")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_attention_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("layout")
                                  .Attr<int64_t>("left")
                                  .Attr<int64_t>("right")
                                  .Attr<float>("scale"));

// Of the headers that this was compiled with. XLA refuses a version beyond its own, and does so only when it starts:
// by then it is too late to go without.
extern "C" CAPIBARA_EXPORT int capibara_native_interface() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
