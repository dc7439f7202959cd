// Packs matrices into panels. Called through ctypes.
#include "panels.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

// Panels `first` to `last` of a matrix [inner, columns] of float32, or bfloat16 if narrow; whole panels only.
CAPIBARA_EXPORT void capibara_to_panels(const void* from, int64_t inner, int64_t columns, int32_t narrow, int64_t first,
                                        int64_t last, void* to) {
  const auto run = narrow != 0 ? capibara::to_panels<2> : capibara::to_panels<4>;
  run(static_cast<const char*>(from), inner, inner, columns, first, last, static_cast<char*>(to));
}

// The same for a matrix stored as [columns, inner].
CAPIBARA_EXPORT void capibara_turned_to_panels(const void* from, int64_t inner, int32_t narrow, int64_t first,
                                               int64_t last, void* to) {
  if (narrow != 0)
    capibara::turned_panels(static_cast<const uint16_t*>(from), inner, first, last, static_cast<uint16_t*>(to));
  else
    capibara::turned_panels(static_cast<const float*>(from), inner, first, last, static_cast<float*>(to));
}
