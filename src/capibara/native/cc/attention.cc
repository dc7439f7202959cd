// The attention kernels as XLA sees them: shapes are read from the buffers, and checked.
#include <algorithm>
#include <string>
#include <utility>

#include "attention.h"
#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using capibara::Attention;
using capibara::Steps;
using Any = ffi::AnyBuffer;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

namespace {

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("capibara attention: ") + what);
}

// [..., heads, length, dim] or [..., length, heads, dim]; all axes before are the batch (`vmap` adds some).
struct Sizes {
  int64_t outer = 1, batch = 1, heads = 0, length = 0, dim = 0;
  Steps steps{};
};

bool measure(const Any& x, ffi::DataType type, int64_t layout, Sizes* s) {
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  if (rank < 4 || x.element_type() != type) return false;
  for (size_t i = 0; i + 4 < rank; ++i) s->outer *= dims[i];
  s->batch = s->outer * dims[rank - 4];
  const bool heads_first = layout == 0;
  s->heads = dims[heads_first ? rank - 3 : rank - 2];
  s->length = dims[heads_first ? rank - 2 : rank - 3];
  s->dim = dims[rank - 1];
  s->steps.batch = s->heads * s->length * s->dim;
  s->steps.head = heads_first ? s->length * s->dim : s->dim;
  s->steps.position = heads_first ? s->dim : s->heads * s->dim;
  return true;
}

bool alike(const Any& x, const Any& y) {
  const auto a = x.dimensions(), b = y.dimensions();
  return x.element_type() == y.element_type() && std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Nothing, or [..., batch or 1, heads or 1, q_len or 1, kv_len or 1] with the leading axes of the query.
bool measure_bias(const Floats& x, const Sizes& q, int64_t kv_len, capibara::Bias* bias) {
  *bias = capibara::Bias{nullptr, std::max<int64_t>(q.outer == 0 ? 1 : q.batch / q.outer, 1), 0, 0, 0, 0, 0};
  if (x.element_count() == 0) return true;
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  if (rank < 4) return false;
  int64_t outer = 1, size = 1;
  for (size_t i = 0; i + 4 < rank; ++i) outer *= dims[i];
  const int64_t full[] = {bias->inner, q.heads, q.length, kv_len};
  int64_t* const steps[] = {&bias->batch, &bias->head, &bias->row, &bias->key};
  for (int i = 3; i >= 0; --i) {
    const int64_t n = dims[rank - 4 + i];
    if (n != 1 && n != full[i]) return false;
    *steps[i] = n == 1 ? 0 : size;
    size *= n;
  }
  bias->outer = size;
  bias->at = x.typed_data();
  return outer == q.outer;
}

// The attributes that every entry has.
struct Options {
  int64_t layout, left, right;
  float scale, softcap;
};

struct Inputs {
  Any query, key, value;
  Floats bias;
  Integers query_ids, key_ids;
};

ffi::Error describe(const Inputs& in, const Any& out, int64_t stats, const Options& o, Attention* a) {
  const ffi::DataType type = in.query.element_type();
  if (type != ffi::F32 && type != ffi::BF16) return refuse("the arrays must be float32 or bfloat16");
  Sizes q, k, v, y;
  if (!measure(in.query, type, o.layout, &q) || !measure(in.key, type, o.layout, &k) ||
      !measure(in.value, type, o.layout, &v) || !measure(out, type, o.layout, &y))
    return refuse("every array needs four axes or more, and one dtype");
  if (k.batch != q.batch || v.batch != q.batch || y.batch != q.batch || k.dim != q.dim || v.heads != k.heads ||
      v.length != k.length || y.heads != q.heads || y.length != q.length || y.dim != v.dim || k.heads == 0 ||
      q.heads % k.heads != 0 || stats != q.batch * q.heads * q.length || o.left < 0 || o.right < 0)
    return refuse("the arrays' shapes do not fit together");
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
  a->left = std::min(o.left, far);
  a->right = std::min(o.right, far);
  a->scale = o.scale;
  a->softcap = o.softcap;
  a->narrow = type == ffi::BF16;
  a->query_steps = q.steps;
  a->key_steps = k.steps;
  a->value_steps = v.steps;
  a->out_steps = y.steps;
  a->query = in.query.untyped_data();
  a->key = in.key.untyped_data();
  a->value = in.value.untyped_data();
  if (!measure_bias(in.bias, q, k.length, &a->bias)) return refuse("the bias' shape does not fit the query's and key's");
  if (in.query_ids.element_count() != 0 || in.key_ids.element_count() != 0) {
    if (in.query_ids.element_count() != static_cast<size_t>(q.batch * q.length) ||
        in.key_ids.element_count() != static_cast<size_t>(k.batch * k.length))
      return refuse("the segments' shapes do not fit the query's and key's");
    a->query_ids = in.query_ids.typed_data();
    a->key_ids = in.key_ids.typed_data();
  }
  return ffi::Error::Success();
}

using Count = int64_t (*)(const Attention&);
using Work = void (*)(const Attention&, int64_t, float*);

ffi::Error run(ffi::ThreadPool& pool, Attention& a, Count items, Count scratch, Work work) {
  a.threads = std::max<int64_t>(pool.num_threads(), 1);
  const bool enough = capibara::Crew::run(pool, items(a), scratch(a),
                                          [&](int64_t item, float* floats) { work(a, item, floats); });
  if (enough) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara attention: no memory for a thread's scratch");
}

ffi::Error forward(ffi::ThreadPool pool, Any query, Any key, Any value, Floats bias, Integers query_ids,
                   Integers key_ids, ffi::Result<Any> out, ffi::Result<Floats> stat, int64_t layout, int64_t left,
                   int64_t right, float scale, float softcap) {
  Attention a;
  const ffi::Error bad = describe({query, key, value, bias, query_ids, key_ids}, *out, stat->element_count(),
                                  {layout, left, right, scale, softcap}, &a);
  if (bad.failure()) return bad;
  a.out = out->untyped_data();
  a.stat = stat->typed_data();
  const auto& kernels = *capibara::isa().attention;
  return run(pool, a, kernels.forward_items, kernels.forward_scratch, kernels.forward);
}

ffi::Error backward(ffi::ThreadPool pool, Any query, Any key, Any value, Floats bias, Integers query_ids,
                    Integers key_ids, Any out, Floats stat, Any out_grad, ffi::Result<Any> query_grad,
                    ffi::Result<Any> key_grad, ffi::Result<Any> value_grad, int64_t layout, int64_t left, int64_t right,
                    float scale, float softcap) {
  Attention a;
  const ffi::Error bad = describe({query, key, value, bias, query_ids, key_ids}, out, stat.element_count(),
                                  {layout, left, right, scale, softcap}, &a);
  if (bad.failure()) return bad;
  if (!alike(out_grad, out) || !alike(*query_grad, query) || !alike(*key_grad, key) || !alike(*value_grad, value))
    return refuse("a gradient has another shape than its array");
  a.out = out.untyped_data();
  a.stat = stat.typed_data();
  a.out_grad = out_grad.untyped_data();
  a.query_grad = query_grad->untyped_data();
  a.key_grad = key_grad->untyped_data();
  a.value_grad = value_grad->untyped_data();
  const auto& kernels = *capibara::isa().attention;
  return run(pool, a, kernels.backward_items, kernels.backward_scratch, kernels.backward);
}

ffi::Error bias_gradient(ffi::ThreadPool pool, Any query, Any key, Any value, Floats bias, Integers query_ids,
                         Integers key_ids, Any out, Floats stat, Any out_grad, ffi::Result<Floats> bias_grad,
                         int64_t layout, int64_t left, int64_t right, float scale, float softcap) {
  Attention a;
  const ffi::Error bad = describe({query, key, value, bias, query_ids, key_ids}, out, stat.element_count(),
                                  {layout, left, right, scale, softcap}, &a);
  if (bad.failure()) return bad;
  const auto x = bias.dimensions(), y = bias_grad->dimensions();
  if (a.bias.at == nullptr || !alike(out_grad, out) || !std::equal(x.begin(), x.end(), y.begin(), y.end()))
    return refuse("a gradient has another shape than its array");
  a.out = out.untyped_data();
  a.stat = stat.typed_data();
  a.out_grad = out_grad.untyped_data();
  a.bias_grad = bias_grad->typed_data();
  const auto& kernels = *capibara::isa().attention;
  return run(pool, a, kernels.bias_items, kernels.bias_scratch, kernels.bias);
}

// What every entry takes first, and its attributes.
auto inputs() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<Floats>()
      .Arg<Integers>()
      .Arg<Integers>();
}

template <typename Binding>
auto options(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("layout")
      .template Attr<int64_t>("left")
      .template Attr<int64_t>("right")
      .template Attr<float>("scale")
      .template Attr<float>("softcap");
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_attention_forward(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_attention_backward(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_attention_bias(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_attention_forward, forward, options(inputs().Ret<Any>().Ret<Floats>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    capibara_attention_backward, backward,
    options(inputs().Arg<Any>().Arg<Floats>().Arg<Any>().Ret<Any>().Ret<Any>().Ret<Any>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_attention_bias, bias_gradient,
                              options(inputs().Arg<Any>().Arg<Floats>().Arg<Any>().Ret<Floats>()));

// Of the headers that this was compiled with. XLA refuses a version beyond its own, and does so only when it starts:
// by then it is too late to go without.
extern "C" CAPIBARA_EXPORT int capibara_native_interface() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
