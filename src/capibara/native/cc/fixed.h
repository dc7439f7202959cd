// The search for each group's scale, of codecs of fixed width: what codecs/fixed_search.py says, group by group.
#pragma once

#include <stdint.h>

namespace capibara {

// Groups of numbers, their candidates and what comes out; laid out as in fixed_native.py.
struct FixedSearch {
  const void* values;  // [groups, size], finite: float64 if `wide`, else float32
  int64_t groups, size;
  const double* scales;  // [128], descending
  const int32_t* book;   // [16], ascending; null for whole levels
  uint8_t* chosen;       // [groups]: the scale's place, and the topmost bit for its sign
  int8_t* codes;         // [groups, size]
  double largest;        // the level of a group's largest number where nothing is cut off
  int32_t wide, bits, fraction, both_signs;
  int32_t low, high;  // steps to try, both included
  int32_t last;       // the largest place
  int32_t cap, shift;  // errors lose `shift` bits and have at most `cap`
};

constexpr int kFixedScales = 128, kFixedUnit = 15, kFixedRatio = 18;

struct FixedKernels {
  int64_t (*scratch)(const FixedSearch&);  // bytes
  void (*search)(const FixedSearch&, void* scratch);
  // The size of each group's largest number.
  void (*largest)(const void* values, int64_t groups, int64_t size, int32_t wide, double* out);
};

}  // namespace capibara
