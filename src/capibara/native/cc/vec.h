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

// Lane l of the result is lane index[l] of a and b, one after the other.
static inline __attribute__((always_inline)) Vec pick(Vec a, Vec b, IntVec index) {
#if defined(__clang__)
  Vec y;
  for (int l = 0; l < kWidth; ++l) y[l] = index[l] < kWidth ? a[index[l]] : b[index[l] - kWidth];
  return y;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

static inline IntVec lanes() {
  IntVec x;
  for (int l = 0; l < kWidth; ++l) x[l] = l;
  return x;
}

static inline float sum(Vec x) {
#pragma GCC unroll 4
  for (int s = kWidth / 2; s > 0; s /= 2) x += pick(x, x, lanes() ^ s);
  return x[0];
}

static inline float max_across(Vec x) {
#pragma GCC unroll 4
  for (int s = kWidth / 2; s > 0; s /= 2) x = max(x, pick(x, x, lanes() ^ s));
  return x[0];
}

// rows[i][l] becomes rows[l][i]: bit by bit of the two indices.
static inline void transpose(Vec rows[kWidth]) {
#pragma GCC unroll 4
  for (int s = 1; s < kWidth; s *= 2) {
    const IntVec high = lanes() & s;
    const IntVec even = high ? lanes() + (kWidth - s) : lanes(), odd = high ? lanes() + kWidth : lanes() + s;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i & s) continue;
      const Vec a = rows[i], b = rows[i | s];
      rows[i] = pick(a, b, even);
      rows[i | s] = pick(a, b, odd);
    }
  }
}

// Numbers in 16 bits, as bfloat16 has them: the upper half of a float.
typedef uint32_t WordVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef uint16_t LooseHalf __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
static inline __attribute__((always_inline)) Vec load(const uint16_t* p) {
  WordVec wide;
#if defined(__AVX2__)
  // GCC 12 converts each half of the vector by itself.
  asm("vpmovzxwd %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const LooseHalf*>(p)));
#else
  wide = __builtin_convertvector((HalfVec) * reinterpret_cast<const LooseHalf*>(p), WordVec);
#endif
  return (Vec)(wide << 16);
}
// Rounded to the nearest, ties to even; a NaN stays one.
static inline void store(uint16_t* p, Vec x) {
  const WordVec bits = (WordVec)x;
  const WordVec rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
  const WordVec kept = (x == x) ? rounded : ((bits >> 16) | 0x40);
  *reinterpret_cast<LooseHalf*>(p) = __builtin_convertvector(kept, HalfVec);
}
static inline float number(float x) { return x; }
static inline float number(uint16_t x) {
  const union {
    uint32_t bits;
    float value;
  } y = {static_cast<uint32_t>(x) << 16};
  return y.value;
}
static inline void put(float* p, float x) { *p = x; }
static inline void put(uint16_t* p, float x) {
  const union {
    float value;
    uint32_t bits;
  } y = {x};
  *p = uint16_t(x == x ? (y.bits + (((y.bits >> 16) & 1) + 0x7fff)) >> 16 : (y.bits >> 16) | 0x40);
}

// x = whole + f with |f| <= 1/2; returns (2^f - 1) and sets power to 2^whole, 0 for whole = -127. x in [-127, 127].
static inline __attribute__((always_inline)) Vec split_exp2(Vec x, Vec* power) {
  // 1.5 * 2^23 + 127: adding it rounds to an integer, whose low bits are then an exponent's.
  const Vec magic = splat(12583039.0f);
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  *power = (Vec)((IntVec)shifted << 23);
  // The polynomial whose largest relative error over [-1/2, 1/2] is smallest, 1.1e-8; found by Lawson's iteration.
  Vec p = splat(1.54035128e-4f);
  p = p * f + splat(1.33907356e-3f);
  p = p * f + splat(9.61823749e-3f);
  p = p * f + splat(5.55035743e-2f);
  p = p * f + splat(2.40226498e-1f);
  p = p * f + splat(6.93147188e-1f);
  return p * f;
}

// 2^x with a relative error below 2e-7 above -126; exactly 0 from -127 down, NaN for NaN. x must not pass 127.
static inline __attribute__((always_inline)) Vec exp2(Vec x) {
  Vec power;
  const Vec p = split_exp2(max(splat(-127.0f), x), &power);  // in this order a NaN stays one
  // A product with the power, not a sum of exponents: a NaN stays one.
  return (p + 1.0f) * power;
}

// The hyperbolic tangent; a relative error below 4e-7.
static inline Vec tanh(Vec x) {
  const Vec size = x < 0 ? -x : x;
  const Vec most = splat(30.0f), twice = size * 2.88539008f;  // 2 log2(e)
  Vec power;
  const Vec p = split_exp2(twice > most ? most : twice, &power);
  const Vec less_one = p * power + (power - 1.0f);  // e^(2 |x|) - 1
  const Vec t = less_one / (less_one + 2.0f);
  return x < 0 ? -t : t;
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

// Calls finish(i, j, sums) for every vector of a tile of products, sum_k a[i * a_step + k] * b[k * b_step + j], whose
// sums begin at start(i). Rows are kRows, columns C * kWidth.
template <int C, class Start, class Finish>
static inline __attribute__((always_inline)) void fused(int64_t depth, const float* a, int64_t a_step, const float* b,
                                                        int64_t b_step, Start start, Finish finish) {
  Vec total[kRows][C];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) total[r][j] = start(r);
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) row[j] = load(b + k * b_step + j * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec x = splat(a[k + r * a_step]);
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) total[r][j] += x * row[j];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) finish(r, j * kWidth, total[r][j]);
}

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
