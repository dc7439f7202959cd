// The scan kernels as XLA sees them: shapes are read from the buffers, and checked.
#include "scan.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

ffi::Error refuse(const char* what) { return ffi::Error::InvalidArgument(std::string("capibara scan: ") + what); }

ffi::Error done(bool enough_memory) {
  if (enough_memory) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara scan: no memory for a thread's scratch");
}

ffi::Error recurrence(ffi::ThreadPool pool, Floats a, Floats x, Floats first, ffi::Result<Floats> out,
                      ffi::Result<Floats> last, int64_t reverse, int64_t late) {
  const auto dims = x.dimensions();
  if (dims.size() == 0 || dims[0] == 0) return refuse("there are no steps");
  capibara::Recurrence r{};
  r.steps = dims[0];
  r.width = x.element_count() / r.steps;
  const int64_t width = r.width, coefficients = a.element_count();
  if ((coefficients != width && coefficients != width * r.steps) || int64_t(first.element_count()) != width ||
      int64_t(last->element_count()) != width || out->element_count() != x.element_count())
    return refuse("the arrays' shapes do not fit together");
  r.a_step = coefficients == width ? 0 : width;
  r.threads = std::max<int64_t>(pool.num_threads(), 1);
  r.reverse = reverse != 0;
  r.late = late != 0;
  r.a = a.typed_data(), r.x = x.typed_data(), r.first = first.typed_data();
  r.out = out->typed_data(), r.last = last->typed_data();
  const auto& kernels = *capibara::isa().scan;
  return done(capibara::Crew::run(pool, kernels.recurrence_items(r), kernels.recurrence_scratch(r),
                                  [&](int64_t item, float* scratch) { kernels.recurrence(r, item, scratch); }));
}

// All axes before the last `rank` are of `vmap`.
bool shaped(const Floats& x, int64_t outer, std::initializer_list<int64_t> wanted) {
  const auto dims = x.dimensions();
  if (dims.size() < wanted.size()) return false;
  int64_t before = 1;
  for (size_t i = 0; i + wanted.size() < dims.size(); ++i) before *= dims[i];
  return before == outer && std::equal(wanted.begin(), wanted.end(), dims.end() - wanted.size());
}

// Reads the sizes of a selective scan, and checks them.
template <class Scan>
bool read_sizes(Scan& s, const Floats& x, const Floats& dt, const Floats& a, const Floats& b, const Floats& c,
                const Floats& first) {
  const auto dims = x.dimensions(), writes = b.dimensions();
  const size_t rank = dims.size();
  if (rank < 4 || writes.size() != rank) return false;
  s.outer = 1;
  for (size_t i = 0; i + 4 < rank; ++i) s.outer *= dims[i];
  s.batch = dims[rank - 4], s.length = dims[rank - 3], s.heads = dims[rank - 2], s.width = dims[rank - 1];
  s.groups = writes[rank - 2], s.states = writes[rank - 1];
  if (s.groups == 0 || s.heads % s.groups != 0 || !shaped(dt, s.outer, {s.batch, s.length, s.heads}) ||
      !shaped(a, s.outer, {s.heads}) || !shaped(b, s.outer, {s.batch, s.length, s.groups, s.states}) ||
      !shaped(c, s.outer, {s.batch, s.length, s.groups, s.states}) ||
      !shaped(first, s.outer, {s.batch, s.heads, s.width, s.states}))
    return false;
  s.x = x.typed_data(), s.dt = dt.typed_data(), s.a = a.typed_data(), s.b = b.typed_data(), s.c = c.typed_data();
  s.first = first.typed_data();
  return true;
}

ffi::Error selective(ffi::ThreadPool pool, Floats x, Floats dt, Floats a, Floats b, Floats c, Floats first,
                     ffi::Result<Floats> y, ffi::Result<Floats> last) {
  capibara::SelectiveScan s{};
  if (!read_sizes(s, x, dt, a, b, c, first) || !shaped(*y, s.outer, {s.batch, s.length, s.heads, s.width}) ||
      !shaped(*last, s.outer, {s.batch, s.heads, s.width, s.states}))
    return refuse("the arrays' shapes do not fit together");
  s.y = y->typed_data(), s.last = last->typed_data();
  const auto& kernels = *capibara::isa().scan;
  return done(capibara::Crew::run(pool, kernels.selective_items(s), kernels.selective_scratch(s),
                                  [&](int64_t item, float* scratch) { kernels.selective(s, item, scratch); }));
}

ffi::Error gradient(ffi::ThreadPool pool, Floats x, Floats dt, Floats a, Floats b, Floats c, Floats first,
                    Floats y_grad, Floats last_grad, ffi::Result<Floats> x_grad, ffi::Result<Floats> dt_grad,
                    ffi::Result<Floats> a_grad, ffi::Result<Floats> b_grad, ffi::Result<Floats> c_grad,
                    ffi::Result<Floats> first_grad) {
  capibara::SelectiveGradient s{};
  const bool fits = read_sizes(s, x, dt, a, b, c, first);
  const auto of = [&](const Floats& v, std::initializer_list<int64_t> wanted) { return shaped(v, s.outer, wanted); };
  if (!fits || !of(y_grad, {s.batch, s.length, s.heads, s.width}) ||
      !of(last_grad, {s.batch, s.heads, s.width, s.states}) || !of(*x_grad, {s.batch, s.length, s.heads, s.width}) ||
      !of(*dt_grad, {s.batch, s.length, s.heads}) || !of(*a_grad, {s.batch, s.heads}) ||
      !of(*b_grad, {s.batch, s.length, s.groups, s.states}) || !of(*c_grad, {s.batch, s.length, s.groups, s.states}) ||
      !of(*first_grad, {s.batch, s.heads, s.width, s.states}))
    return refuse("the arrays' shapes do not fit together");
  s.y_grad = y_grad.typed_data(), s.last_grad = last_grad.typed_data();
  s.x_grad = x_grad->typed_data(), s.dt_grad = dt_grad->typed_data(), s.a_grad = a_grad->typed_data();
  s.b_grad = b_grad->typed_data(), s.c_grad = c_grad->typed_data(), s.first_grad = first_grad->typed_data();
  if (x.element_count() == 0 || s.states == 0) {
    for (auto* grad : {&x_grad, &dt_grad, &a_grad, &b_grad, &c_grad})
      std::fill_n((*grad)->typed_data(), (*grad)->element_count(), 0.0f);
    std::copy_n(s.last_grad, last_grad.element_count(), s.first_grad);
    return ffi::Error::Success();
  }
  // Heads of a group share gradients: no more parts than keep the threads busy, for each but the first takes memory.
  const int64_t apart = s.outer * s.batch * s.groups, threads = std::max<int64_t>(pool.num_threads(), 1);
  s.parts = std::clamp<int64_t>((2 * threads + apart - 1) / apart, 1, s.heads / s.groups);
  const int64_t size = b.element_count();
  std::unique_ptr<float[]> partial(new (std::nothrow) float[2 * size * (s.parts - 1)]);
  if (partial == nullptr) return done(false);
  s.partial = partial.get();
  const auto& kernels = *capibara::isa().scan;
  if (!capibara::Crew::run(pool, kernels.gradient_items(s), kernels.gradient_scratch(s),
                           [&](int64_t item, float* scratch) { kernels.gradient(s, item, scratch); }))
    return done(false);
  constexpr int64_t kPiece = 1 << 14;
  const int64_t pieces = s.parts == 1 ? 0 : (size + kPiece - 1) / kPiece;
  return done(capibara::Crew::run(pool, 2 * pieces, 1, [&](int64_t item, float*) {
    const int64_t begin = item / 2 * kPiece, end = std::min(begin + kPiece, size);
    float* to = item % 2 == 0 ? s.b_grad : s.c_grad;
    const float* from = s.partial + (item % 2 == 0 ? 0 : size);
    for (int64_t part = 1; part < s.parts; ++part, from += 2 * size)
      for (int64_t i = begin; i < end; ++i) to[i] += from[i];
  }));
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_recurrence(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_selective_scan(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_selective_scan_backward(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_recurrence, recurrence,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("reverse")
                                  .Attr<int64_t>("late"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_selective_scan, selective,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_selective_scan_backward, gradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());
