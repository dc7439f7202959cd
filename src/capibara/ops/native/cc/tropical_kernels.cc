// Max-plus matrix product, for one instruction set.
//
// A register tile of the result runs over the depth, as in an ordinary matrix product; addition takes the place of
// the multiplication and the maximum that of the sum. A block of the right operand is packed into panels as wide as
// the tile. The maximum ignores NaN, so that -inf + inf counts as nothing: the zero of the semiring wins. An entry
// that reads a NaN has one anywhere in its row of the left operand or its column of the right one; these are found
// apart, and marked at the end.
#include "tropical.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Tropical;

constexpr int64_t kDepth = 256;         // of a packed block
constexpr int64_t kColumns = 256;       // of an item
constexpr int64_t kMostRows = 132;      // of an item, about
constexpr int kArgRows = kRows < 6 ? 2 : kRows / 2;  // a tile with indices needs twice the registers

template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(kWidth * 4)));
  typedef float L __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(kWidth * 4)));
  typedef int32_t LI __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
  typedef int32_t Int;
};
template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(kWidth * 4)));
  typedef double L __attribute__((vector_size(kWidth * 4), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(kWidth * 4)));
  typedef int64_t LI __attribute__((vector_size(kWidth * 4), aligned(8), may_alias));
  typedef int64_t Int;
};

template <typename T, int R, bool kIndex>
static inline void max_plus(int64_t depth, const T* a, int64_t row_step, const T* panel, T* c,
                            typename Lanes<T>::Int* index, int64_t c_step, int64_t first) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  typedef typename Lanes<T>::L L;
  typedef typename Lanes<T>::LI LI;
  constexpr int W = kWidth * 4 / sizeof(T);
  V best[R][kVectors];
  I at[kIndex ? R : 1][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      best[r][j] = *reinterpret_cast<const L*>(c + r * c_step + j * W);
      if (kIndex) at[r][j] = *reinterpret_cast<const LI*>(index + r * c_step + j * W);
    }
  for (int64_t k = 0; k < depth; ++k) {
    V row[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) row[j] = *reinterpret_cast<const L*>(panel + k * kVectors * W + j * W);
    const I here = (typename Lanes<T>::Int)(first + k) - (I){};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const V x = a[r * row_step + k] - (V){};
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        const V term = x + row[j];
        if (kIndex) at[r][j] = term > best[r][j] ? here : at[r][j];
        best[r][j] = term > best[r][j] ? term : best[r][j];
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<L*>(c + r * c_step + j * W) = best[r][j];
      if (kIndex) *reinterpret_cast<LI*>(index + r * c_step + j * W) = at[r][j];
    }
}

template <typename T, int R, bool kIndex>
struct UpTo {
  static void run(int rows, int64_t depth, const T* a, int64_t row_step, const T* panel, T* c,
                  typename Lanes<T>::Int* index, int64_t c_step, int64_t first) {
    if (rows == R)
      max_plus<T, R, kIndex>(depth, a, row_step, panel, c, index, c_step, first);
    else
      UpTo<T, R - 1, kIndex>::run(rows, depth, a, row_step, panel, c, index, c_step, first);
  }
};
template <typename T, bool kIndex>
struct UpTo<T, 0, kIndex> {
  static void run(int, int64_t, const T*, int64_t, const T*, T*, typename Lanes<T>::Int*, int64_t, int64_t) {}
};

static int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Rows of an item: about equal shares, of whole tiles.
static int64_t share(const Tropical& p) {
  const int64_t count = parts(p.rows, kMostRows);
  return parts(parts(p.rows, count), kRows) * kRows;
}

static int64_t tropical_items(const Tropical& p) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return 0;
  return p.batch * parts(p.rows, share(p)) * parts(p.columns, kColumns);
}

static int64_t tropical_scratch(const Tropical& p, int64_t bytes) {
  const int64_t room = kDepth * kColumns + 2 * (kMostRows + kRows) * kColumns + kColumns;
  (void)p;
  return room * (bytes / 4);
}

template <typename T, bool kIndex>
static void compute(const Tropical& p, int64_t item, float* scratch) {
  typedef typename Lanes<T>::Int Int;
  constexpr int64_t kWide = kVectors * kWidth * 4 / sizeof(T);
  constexpr int kTile = kIndex ? kArgRows : kRows;
  constexpr T kZero = -static_cast<T>(__builtin_inf());
  const int64_t size = share(p);
  const int64_t across = parts(p.columns, kColumns), down = parts(p.rows, size);
  const int64_t batch = item / (across * down);
  const int64_t i0 = item / across % down * size, j0 = item % across * kColumns;
  const int64_t rows = p.rows - i0 < size ? p.rows - i0 : size;
  const int64_t columns = p.columns - j0 < kColumns ? p.columns - j0 : kColumns;
  const T* a = static_cast<const T*>(p.a) + (batch * p.rows + i0) * p.depth;
  const T* b = static_cast<const T*>(p.b) + batch * p.depth * p.columns + j0;
  T* panels = reinterpret_cast<T*>(scratch);
  T* c = panels + kDepth * kColumns;
  Int* index = reinterpret_cast<Int*>(c + (kMostRows + kRows) * kColumns);
  Int* bad = index + (kMostRows + kRows) * kColumns;  // columns that hold a NaN

  for (int64_t n = 0; n < rows * kColumns; ++n) c[n] = kZero;
  if (kIndex)
    for (int64_t n = 0; n < rows * kColumns; ++n) index[n] = -1;
  for (int64_t j = 0; j < columns; ++j) bad[j] = 0;
  for (int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
    const int64_t depth = p.depth - k0 < kDepth ? p.depth - k0 : kDepth;
    for (int64_t k = 0; k < depth; ++k) {
      const T* from = b + (k0 + k) * p.columns;
      for (int64_t j = 0; j < columns; ++j) bad[j] |= from[j] != from[j];
      for (int64_t j = 0; j < columns; j += kWide) {
        T* to = panels + j * depth + k * kWide;
        if (columns - j >= kWide)
          for (int64_t w = 0; w < kWide; ++w) to[w] = from[j + w];
        else
          for (int64_t w = 0; w < kWide; ++w) to[w] = j + w < columns ? from[j + w] : kZero;
      }
    }
    for (int64_t j = 0; j < columns; j += kWide)
      for (int64_t i = 0; i < rows; i += kTile)
        UpTo<T, kTile, kIndex>::run(rows - i < kTile ? int(rows - i) : kTile, depth, a + i * p.depth + k0, p.depth,
                                    panels + j * depth, c + i * kColumns + j, index + i * kColumns + j, kColumns, k0);
  }
  for (int64_t i = 0; i < rows; ++i) {
    Int worse = 0;
    for (int64_t k = 0; k < p.depth; ++k) worse |= a[i * p.depth + k] != a[i * p.depth + k];
    const int64_t at = (batch * p.rows + i0 + i) * p.columns + j0;
    T* out = static_cast<T*>(p.out) + at;
    for (int64_t j = 0; j < columns; ++j)
      out[j] = worse | bad[j] ? static_cast<T>(__builtin_nan("")) : c[i * kColumns + j];
    if (kIndex)
      for (int64_t j = 0; j < columns; ++j) p.index[at + j] = worse | bad[j] ? -1 : int32_t(index[i * kColumns + j]);
  }
}

template <typename T>
static void tropical(const Tropical& p, int64_t item, float* scratch) {
  if (p.index == nullptr)
    compute<T, false>(p, item, scratch);
  else
    compute<T, true>(p, item, scratch);
}

extern const capibara::TropicalKernels kTropical;
const capibara::TropicalKernels kTropical = {tropical_items, tropical_scratch, tropical<float>, tropical<double>};

}  // namespace CAPIBARA_ISA
