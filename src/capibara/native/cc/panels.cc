// Packs matrices into panels. Called through ctypes.
#include <cstring>

#include "numbers.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kTogether = 8;  // panels: pieces of rows that the processor foresees, and lines that it writes in turn

template <int64_t bytes>
void to_panels(const char* from, int64_t inner, int64_t columns, int64_t first, int64_t last, char* to) {
  constexpr int64_t row = capibara::kPanelColumns * bytes;
  for (int64_t begin = first; begin < last; begin += kTogether) {
    const int64_t end = begin + kTogether < last ? begin + kTogether : last;
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t panel = begin; panel < end; ++panel)
        std::memcpy(to + (panel * inner + k) * row, from + k * columns * bytes + panel * row, row);
  }
}

// The matrix is stored as [columns, inner].
template <typename T>
void turned_panels(const T* from, int64_t inner, int64_t first, int64_t last, T* to) {
  constexpr int64_t across = capibara::kPanelColumns;
  for (int64_t panel = first; panel < last; ++panel) {
    const T* const rows = from + panel * across * inner;
    T* const own = to + panel * across * inner;
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t c = 0; c < across; ++c) own[k * across + c] = rows[c * inner + k];
  }
}

}  // namespace

// Panels `first` to `last` of a matrix [inner, columns] of float32, or bfloat16 if narrow; whole panels only.
CAPIBARA_EXPORT void capibara_to_panels(const void* from, int64_t inner, int64_t columns, int32_t narrow, int64_t first,
                                        int64_t last, void* to) {
  const auto run = narrow != 0 ? to_panels<2> : to_panels<4>;
  run(static_cast<const char*>(from), inner, columns, first, last, static_cast<char*>(to));
}

// The same for a matrix stored as [columns, inner].
CAPIBARA_EXPORT void capibara_turned_to_panels(const void* from, int64_t inner, int32_t narrow, int64_t first,
                                               int64_t last, void* to) {
  if (narrow != 0)
    turned_panels(static_cast<const uint16_t*>(from), inner, first, last, static_cast<uint16_t*>(to));
  else
    turned_panels(static_cast<const float*>(from), inner, first, last, static_cast<float*>(to));
}
