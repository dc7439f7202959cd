// Copies of matrices into panels of columns.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace capibara {

// Panels: pieces of rows that the processor foresees, and lines that it writes in turn.
constexpr int64_t kPanelsTogether = 8;

// Rows of a matrix [inner, columns], `count` of them from a row on: `to` is where that row lies in the first panel.
template <int64_t bytes>
void to_panels(const char* from, int64_t count, int64_t inner, int64_t columns, int64_t first, int64_t last, char* to) {
  constexpr int64_t row = kPanelColumns * bytes;
  for (int64_t begin = first; begin < last; begin += kPanelsTogether) {
    const int64_t end = begin + kPanelsTogether < last ? begin + kPanelsTogether : last;
    for (int64_t k = 0; k < count; ++k)
      for (int64_t panel = begin; panel < end; ++panel)
        std::memcpy(to + (panel * inner + k) * row, from + k * columns * bytes + panel * row, row);
  }
}

// The matrix is stored as [columns, inner].
template <typename T>
void turned_panels(const T* from, int64_t inner, int64_t first, int64_t last, T* to) {
  constexpr int64_t across = kPanelColumns;
  for (int64_t panel = first; panel < last; ++panel) {
    const T* const rows = from + panel * across * inner;
    T* const own = to + panel * across * inner;
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t c = 0; c < across; ++c) own[k * across + c] = rows[c * inner + k];
  }
}

}  // namespace capibara
