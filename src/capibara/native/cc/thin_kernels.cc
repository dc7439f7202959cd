// Products of a few rows with a matrix, compiled once per instruction set. What takes the time is reading the matrix:
// it is read once, in the order in which it lies, and nothing of it is copied. A row's sums do not depend on how many
// rows there are.
#include "thin.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::ThinProduct;

constexpr int kTogether = 8;        // rows that share what is read
constexpr int kDeep = 8;            // rows of the matrix that are read side by side
constexpr int64_t kMostWide = 2048;  // columns of an item: its sums stay in the cache
constexpr int64_t kLeastWide = 128;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }

// Columns of an item: several for each thread, so that they end together.
static int64_t wide(const ThinProduct& p) {
  const int64_t even = parts(parts(p.columns, 4 * p.threads), kWidth) * kWidth;
  return even < kLeastWide ? kLeastWide : least(even, kMostWide);
}

static int64_t thin_items(const ThinProduct& p) { return p.rows == 0 ? 0 : parts(p.columns, wide(p)); }

// Sums lie in scratch, one row of it for each of x: rows of the result may be a power of two apart, as those of the
// matrix may, and would meet in the caches.
static int64_t step(const ThinProduct& p) { return wide(p) + 16; }

// D rows of the matrix from k on, for R rows of x.
template <int R, int D>
static void add_rows(const ThinProduct& p, int64_t i, int64_t k, int64_t first, int64_t width, float* sums) {
  float factors[D][R];
  for (int d = 0; d < D; ++d)
    for (int r = 0; r < R; ++r) factors[d][r] = p.x[(i + r) * p.inner + k + d];
  const float* const w = p.w + k * p.columns + first;
  const int64_t down = step(p);
  sums += i * down;
  int64_t j = 0;
  for (; j + kWidth <= width; j += kWidth) {
    Vec total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] = k == 0 ? (Vec){} : load(sums + r * down + j);
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) {
      const Vec row = load(w + d * p.columns + j);
      __builtin_prefetch(w + (D + d) * p.columns + j);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[r] += splat(factors[d][r]) * row;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(sums + r * down + j, total[r]);
  }
  for (; j < width; ++j)
    for (int r = 0; r < R; ++r) {
      float total = k == 0 ? 0 : sums[r * down + j];
      for (int d = 0; d < D; ++d) total += factors[d][r] * w[d * p.columns + j];
      sums[r * down + j] = total;
    }
}

template <int D>
static void add_block(const ThinProduct& p, int64_t k, int64_t first, int64_t width, float* sums) {
  int64_t i = 0;
  for (; i + kTogether <= p.rows; i += kTogether) add_rows<kTogether, D>(p, i, k, first, width, sums);
  for (; i + 4 <= p.rows; i += 4) add_rows<4, D>(p, i, k, first, width, sums);
  for (; i + 2 <= p.rows; i += 2) add_rows<2, D>(p, i, k, first, width, sums);
  for (; i < p.rows; ++i) add_rows<1, D>(p, i, k, first, width, sums);
}

// R rows of x with C columns of the matrix, which lie one after the other.
template <int R, int C>
static void dot_columns(const ThinProduct& p, int64_t i, int64_t j) {
  const float* const x = p.x + i * p.inner;
  const float* const w = p.w + j * p.inner;
  Vec total[R][C] = {};
  int64_t k = 0;
  for (; k + kWidth <= p.inner; k += kWidth) {
    Vec column[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      column[c] = load(w + c * p.inner + k);
      __builtin_prefetch(w + (C + c) * p.inner + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec row = load(x + r * p.inner + k);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) total[r][c] += row * column[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float found = sum(total[r][c]);
      for (int64_t l = k; l < p.inner; ++l) found += x[r * p.inner + l] * w[c * p.inner + l];
      p.out[(i + r) * p.columns + j + c] = found;
    }
}

template <int C>
static void dot_block(const ThinProduct& p, int64_t j) {
  constexpr int kMany = kWidth >= 16 ? 8 : 4;  // with two columns their sums are held in registers
  int64_t i = 0;
  for (; i + kMany <= p.rows; i += kMany) dot_columns<kMany, C>(p, i, j);
  for (; i + 2 <= p.rows; i += 2) dot_columns<2, C>(p, i, j);
  for (; i < p.rows; ++i) dot_columns<1, C>(p, i, j);
}

static int64_t thin_scratch(const ThinProduct& p) { return p.by_column ? 1 : p.rows * step(p); }

static void thin_multiply(const ThinProduct& p, int64_t item, float* sums) {
  const int64_t first = item * wide(p), width = least(wide(p), p.columns - first);
  if (p.by_column) {
    int64_t j = first;
    for (; j + 2 <= first + width; j += 2) dot_block<2>(p, j);
    for (; j < first + width; ++j) dot_block<1>(p, j);
    return;
  }
  if (p.inner == 0)
    for (int64_t i = 0; i < p.rows * step(p); ++i) sums[i] = 0;
  int64_t k = 0;
  for (; k + kDeep <= p.inner; k += kDeep) add_block<kDeep>(p, k, first, width, sums);
  for (; k < p.inner; ++k) add_block<1>(p, k, first, width, sums);
  for (int64_t i = 0; i < p.rows; ++i)
    __builtin_memcpy(p.out + i * p.columns + first, sums + i * step(p), width * sizeof(float));
}

extern const capibara::ThinKernels kThin;
const capibara::ThinKernels kThin = {thin_items, thin_scratch, thin_multiply};

}  // namespace CAPIBARA_ISA
