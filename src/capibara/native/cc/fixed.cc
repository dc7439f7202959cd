// What codecs of fixed width call through ctypes.
#include "fixed.h"

#include <cstdlib>

#include "isa.h"

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
  for (int64_t row = first; row < last; ++row, out += end - begin)
    capibara::isa().quantised->decode(*codes, row, begin, end, top, out);
}
