// What codecs of fixed width call through ctypes.
#include "fixed.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "codec_parts.h"
#include "isa.h"
#include "quantised.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

// 0, or -2 without memory.
CAPIBARA_EXPORT int32_t capibara_fixed_search(const capibara::FixedSearch* search) {
  const auto& kernels = *capibara::isa().fixed;
  const size_t bytes = (static_cast<size_t>(kernels.scratch(*search)) + 63) / 64 * 64;
  void* const scratch = std::aligned_alloc(64, bytes);
  if (scratch == nullptr) return -2;
  kernels.search(*search, scratch);
  std::free(scratch);
  return 0;
}

CAPIBARA_EXPORT void capibara_fixed_largest(const void* values, int64_t groups, int64_t size, int32_t wide,
                                            double* out) {
  capibara::isa().fixed->largest(values, groups, size, wide, out);
}

// Columns `begin` (a multiple of 64) to `end` of rows `first` to `last` of a matrix in codes, as numbers within ±top.
CAPIBARA_EXPORT void capibara_codes_decode(const capibara::Codes* codes, int64_t first, int64_t last, int64_t begin,
                                           int64_t end, float top, float* out) {
  capibara::isa().quantised->decode(*codes, first, last, begin, end, top, out);
}

// A product on up to `threads` threads of its own; `room` is not looked at. 0, or -2 without memory.
CAPIBARA_EXPORT int32_t capibara_codes_multiply(const capibara::CodesProduct* product) try {
  const auto taken = [](int64_t floats) {
    const size_t bytes = (static_cast<size_t>(std::max<int64_t>(floats, 1)) * sizeof(float) + 63) / 64 * 64;
    std::unique_ptr<float, decltype(&std::free)> found(static_cast<float*>(std::aligned_alloc(64, bytes)), &std::free);
    if (found == nullptr) throw std::bad_alloc();
    return found;
  };
  capibara::CodesProduct p = *product;
  const auto& kernels = *capibara::isa().quantised;
  const auto room = taken(kernels.room(p));
  p.room = room.get();
  const int threads = static_cast<int>(p.threads);
  for (int64_t i = 0; i < kernels.pack_items(p); ++i) kernels.pack(p, i);
  capibara::each(threads, kernels.items(p), [&](int64_t i) {
    const auto scratch = taken(kernels.scratch(p));
    kernels.multiply(p, i, scratch.get());
  });
  if (kernels.block(p) != 0) kernels.finish(p, 0);
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}
