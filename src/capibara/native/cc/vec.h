// Portable vectors (GCC and Clang vector extensions) and the one matrix product that the kernels are made of.
//
// This header is compiled once per instruction set, each time into a namespace of that name. It includes no
// header with inline functions: the linker keeps one copy of such a function, and that copy could hold
// instructions which the running processor lacks.
#pragma once

#include <stdint.h>

#ifndef CAPIBARA_ISA
#error "CAPIBARA_ISA names the instruction set that this file is compiled for"
#endif

namespace CAPIBARA_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a vector
constexpr int kRows = 12;   // rows of a register tile: 12 x 2 sums of 32 registers
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRows = 6;  // 6 x 2 sums, two operands and a broadcast in 16 registers
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kRows = 8;  // 8 x 2 sums of 32 registers
#else
constexpr int kWidth = 4;
constexpr int kRows = 4;
#endif
constexpr int kVectors = 2;  // vectors across a register tile

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
// The same, for addresses that are aligned to a float only.
typedef float Loose __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline void store(float* p, Vec x) { *reinterpret_cast<Loose*>(p) = x; }
static inline Vec splat(float x) { return x - (Vec){}; }
static inline Vec select(IntVec mask, Vec a, Vec b) { return mask ? a : b; }
static inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

static inline float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += x[i];
  return total;
}

static inline float max_across(Vec x) {
  float best = x[0];
  for (int i = 1; i < kWidth; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// 2^x with a relative error below 2e-7 above -126; exactly 0 from -127 down, NaN for NaN. x must not pass 127.
static inline Vec exp2(Vec x) {
  const Vec low = splat(-127.0f);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = max(low, x);  // in this order a NaN stays one
  const Vec shifted = x + magic;
  const IntVec whole = (IntVec)shifted - (IntVec)magic;
  const Vec f = x - (shifted - magic);
  // Taylor coefficients ln(2)^k / k!; |f| <= 1/2, so the term left out is below 1e-8 of the result.
  Vec p = splat(1.52527338e-5f);
  p = p * f + splat(1.54035304e-4f);
  p = p * f + splat(1.33335581e-3f);
  p = p * f + splat(9.61812911e-3f);
  p = p * f + splat(5.55041087e-2f);
  p = p * f + splat(2.40226507e-1f);
  p = p * f + splat(6.93147181e-1f);
  p = p * f + splat(1.0f);
  // A product with the power, not a sum of exponents: a NaN stays one.
  return p * (Vec)((whole + 127) << 23);
}

template <int R, int C>
static inline void tile(int64_t depth, const float* a, int64_t row_step, int64_t depth_step, const float* b,
                        int64_t b_step, float* c, int64_t c_step, bool add) {
  Vec total[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) total[r][j] = add ? load(c + r * c_step + j * kWidth) : (Vec){};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) row[j] = load(b + k * b_step + j * kWidth);
    const float* column = a + k * depth_step;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec x = splat(column[r * row_step]);
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) total[r][j] += x * row[j];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) store(c + r * c_step + j * kWidth, total[r][j]);
}

template <int R, int C>
struct Rows {
  static void run(int rows, int64_t depth, const float* a, int64_t row_step, int64_t depth_step, const float* b,
                  int64_t b_step, float* c, int64_t c_step, bool add) {
    if (rows == R)
      tile<R, C>(depth, a, row_step, depth_step, b, b_step, c, c_step, add);
    else
      Rows<R - 1, C>::run(rows, depth, a, row_step, depth_step, b, b_step, c, c_step, add);
  }
};
template <int C>
struct Rows<0, C> {
  static void run(int, int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t, bool) {}
};

// c[i, j] (+)= sum_k a[i * row_step + k * depth_step] * b[k * b_step + j], for columns a multiple of kWidth.
static inline void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_step,
                           int64_t depth_step, const float* b, int64_t b_step, float* c, int64_t c_step, bool add) {
  int64_t j = 0;
  for (; j + kVectors * kWidth <= columns; j += kVectors * kWidth)
    for (int64_t i = 0; i < rows; i += kRows)
      Rows<kRows, kVectors>::run(rows - i < kRows ? int(rows - i) : kRows, depth, a + i * row_step, row_step,
                                 depth_step, b + j, b_step, c + i * c_step + j, c_step, add);
  for (; j < columns; j += kWidth)
    for (int64_t i = 0; i < rows; i += kRows)
      Rows<kRows, 1>::run(rows - i < kRows ? int(rows - i) : kRows, depth, a + i * row_step, row_step, depth_step,
                          b + j, b_step, c + i * c_step + j, c_step, add);
}

}  // namespace CAPIBARA_ISA
