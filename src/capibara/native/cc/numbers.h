// Numbers of a matrix in memory.
#pragma once

#include <stdint.h>

namespace capibara {

#define CAPIBARA_IN_LINE __attribute__((always_inline)) inline  // see vec.h

// A matrix [inner, columns] packed into panels is [columns / 16, inner, 16]: the columns that a product sums at a time are
// adjacent, and the whole is read sequentially.
constexpr int64_t kPanelColumns = 16;

// float32; or bfloat16, which are the upper halves of such.
struct Numbers {
  const void* at = nullptr;
  bool narrow = false;  // bfloat16

  CAPIBARA_IN_LINE Numbers() {}
  CAPIBARA_IN_LINE Numbers(const float* floats) : at(floats) {}
  CAPIBARA_IN_LINE Numbers(const void* numbers, bool are_narrow) : at(numbers), narrow(are_narrow) {}

  CAPIBARA_IN_LINE int64_t bytes() const { return narrow ? 2 : 4; }
  CAPIBARA_IN_LINE Numbers operator+(int64_t n) const { return {static_cast<const char*>(at) + n * bytes(), narrow}; }
  CAPIBARA_IN_LINE Numbers& operator+=(int64_t n) { return *this = *this + n; }
};

}  // namespace capibara
