// Passes over rows as XLA sees them: shapes are read from the buffers, and checked.
#include "elementwise.h"

#include <algorithm>
#include <memory>
#include <string>

#include "isa.h"
#include "pages.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using Any = ffi::AnyBuffer;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

constexpr int64_t kPart = 1 << 15;  // numbers of an array that are dealt with at a time
constexpr int64_t kSums = 64;        // most sums over rows
constexpr int64_t kScratch = 16;     // floats that nobody needs: an allocation of nothing may look like a failed one

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara pass over rows: ") + why);
}

ffi::Error finished(bool enough) {
  if (enough) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara pass over rows: out of memory");
}

bool alike(const Floats& x, const Floats& y) {
  const auto a = x.dimensions(), b = y.dimensions();
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

int64_t features_of(const Floats& x) { return x.dimensions().size() == 0 ? 1 : x.dimensions().back(); }

// x [..., features], scale [features]; y like x, inverse [rows].
ffi::Error rms_norm(ffi::ThreadPool pool, Floats x, Floats scale, ffi::Result<Floats> y, ffi::Result<Floats> inverse,
                    float epsilon, float offset) {
  const int64_t features = features_of(x), count = x.element_count(), rows = features == 0 ? 0 : count / features;
  if (!alike(x, *y) || scale.element_count() != size_t(features) || inverse->element_count() != size_t(rows))
    return refuse("the arrays' shapes do not fit together");
  if (count == 0) return ffi::Error::Success();
  capibara::prefer_large_pages(y->untyped_data(), y->size_bytes());
  const int64_t part = std::max<int64_t>(kPart / features, 1);
  const auto work = [&](int64_t item, float*) {
    const int64_t first = item * part, at = first * features;
    capibara::isa().elementwise->rms_norm({std::min(part, rows - first), features, x.typed_data() + at,
                                           scale.typed_data(), offset, epsilon, y->typed_data() + at,
                                           inverse->typed_data() + first});
  };
  return finished(capibara::Crew::run(pool, (rows + part - 1) / part, kScratch, work));
}

ffi::Error rms_norm_backward(ffi::ThreadPool pool, Floats x, Floats scale, Floats inverse, Floats y_slope,
                             ffi::Result<Floats> x_slope, ffi::Result<Floats> scale_slope, float offset) {
  const int64_t features = features_of(x), count = x.element_count(), rows = features == 0 ? 0 : count / features;
  if (!alike(x, y_slope) || !alike(x, *x_slope) || scale.element_count() != size_t(features) ||
      scale_slope->element_count() != size_t(features) || inverse.element_count() != size_t(rows))
    return refuse("the arrays' shapes do not fit together");
  float* const total = scale_slope->typed_data();
  std::fill(total, total + features, 0.0f);
  if (count == 0) return ffi::Error::Success();
  capibara::prefer_large_pages(x_slope->untyped_data(), x_slope->size_bytes());
  // Each part has a sum of its own, as long as a row: they are few, so that many long rows take no more memory.
  const int64_t part = std::max<int64_t>({kPart / features, (rows + kSums - 1) / kSums, 1});
  const int64_t parts = (rows + part - 1) / part;
  // Sums of the parts, which are added in their order: the same each time, whichever thread had which part.
  const std::unique_ptr<float[]> sums(new (std::nothrow) float[parts * features]);
  if (sums == nullptr) return finished(false);
  const auto work = [&](int64_t item, float*) {
    const int64_t first = item * part, at = first * features;
    capibara::isa().elementwise->rms_norm_backward(
        {std::min(part, rows - first), features, x.typed_data() + at, scale.typed_data(),
         inverse.typed_data() + first, y_slope.typed_data() + at, offset,
         x_slope->typed_data() + at, sums.get() + item * features});
  };
  if (!capibara::Crew::run(pool, parts, kScratch, work)) return finished(false);
  for (int64_t i = 0; i < parts; ++i)
    for (int64_t j = 0; j < features; ++j) total[j] += sums[i * features + j];
  return ffi::Error::Success();
}

ffi::Error gated(ffi::ThreadPool pool, Floats gate, Floats up, ffi::Result<Floats> y) {
  if (!alike(gate, up) || !alike(gate, *y)) return refuse("the arrays' shapes differ");
  capibara::prefer_large_pages(y->untyped_data(), y->size_bytes());
  const int64_t count = gate.element_count();
  const auto work = [&](int64_t item, float*) {
    const int64_t at = item * kPart;
    capibara::isa().elementwise->gated({std::min(kPart, count - at), gate.typed_data() + at, up.typed_data() + at,
                                        nullptr, y->typed_data() + at, nullptr, nullptr});
  };
  return finished(capibara::Crew::run(pool, (count + kPart - 1) / kPart, kScratch, work));
}

ffi::Error gated_backward(ffi::ThreadPool pool, Floats gate, Floats up, Floats y_slope,
                          ffi::Result<Floats> gate_slope, ffi::Result<Floats> up_slope) {
  if (!alike(gate, up) || !alike(gate, y_slope) || !alike(gate, *gate_slope) || !alike(gate, *up_slope))
    return refuse("the arrays' shapes differ");
  for (auto slope : {gate_slope, up_slope})
    capibara::prefer_large_pages(slope->untyped_data(), slope->size_bytes());
  const int64_t count = gate.element_count();
  const auto work = [&](int64_t item, float*) {
    const int64_t at = item * kPart;
    capibara::isa().elementwise->gated_backward({std::min(kPart, count - at), gate.typed_data() + at,
                                                 up.typed_data() + at, y_slope.typed_data() + at, nullptr,
                                                 gate_slope->typed_data() + at, up_slope->typed_data() + at});
  };
  return finished(capibara::Crew::run(pool, (count + kPart - 1) / kPart, kScratch, work));
}

// x [*batch, length, heads, features], tables [*batch, length, pairs] or [length, pairs]; y like x.
ffi::Error turned(ffi::ThreadPool pool, Floats x, Floats cos, Floats sin, ffi::Result<Floats> y, float sign) {
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  if (rank < 3 || !alike(x, *y) || !alike(cos, sin) || cos.dimensions().size() < 2)
    return refuse("the arrays' shapes do not fit together");
  const int64_t features = dims[rank - 1], heads = dims[rank - 2], count = x.element_count();
  const int64_t pairs = cos.dimensions().back(), known = pairs == 0 ? 0 : cos.element_count() / pairs;
  if (count == 0) return ffi::Error::Success();
  const int64_t rows = count / (features * heads);
  // Rows of tables that all rows of the batch have in common come again and again.
  if (2 * pairs > features || known == 0 || rows % known != 0 || known % dims[rank - 3] != 0)
    return refuse("the tables do not fit the array");
  capibara::prefer_large_pages(y->untyped_data(), y->size_bytes());
  // A part lies within one round of the tables.
  const int64_t part = std::min(std::max<int64_t>(kPart / (features * heads), 1), known);
  const int64_t parts = (known + part - 1) / part;
  const auto work = [&](int64_t item, float*) {
    const int64_t round = item / parts, at = item % parts * part, first = round * known + at;
    capibara::isa().elementwise->turned({std::min(part, known - at), heads, features, pairs,
                                         x.typed_data() + first * features * heads, cos.typed_data() + at * pairs,
                                         sin.typed_data() + at * pairs, sign,
                                         y->typed_data() + first * features * heads});
  };
  return finished(capibara::Crew::run(pool, rows / known * parts, kScratch, work));
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_rms_norm(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_rms_norm_backward(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_gated(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_gated_backward(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_turned(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_rms_norm_backward, rms_norm_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    capibara_gated, gated,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_gated_backward, gated_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_turned, turned,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("sign"));
