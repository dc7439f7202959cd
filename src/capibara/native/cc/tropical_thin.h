// Max-plus products with few columns, a matrix by a vector above all, for one instruction set.
//
// A register tile would leave its lanes empty there. What takes the time is reading the left operand, so each of its
// rows is read once, with the vectors along the depth, and the lanes' maxima are compared at the end. As elsewhere the
// maximum ignores NaN, and NaN in the operands is found apart.
#pragma once

namespace CAPIBARA_ISA {

constexpr int64_t kThin = 8;          // products with fewer columns are thin
constexpr int64_t kThinWork = 1 << 15;  // numbers of the left operand that are worth an item

static inline bool is_thin(const Tropical& p) { return p.columns < kThin; }

static int64_t thin_rows(const Tropical& p) {
  const int64_t least = parts(kThinWork, p.depth > 0 ? p.depth : 1);
  const int64_t even = parts(p.rows * p.batch, 4 * p.threads);
  const int64_t rows = even > least ? even : least;
  return rows < p.rows ? rows : p.rows;
}

template <typename T, bool kIndex>
static void thin(const Tropical& p, int64_t item, float* scratch) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  typedef typename Lanes<T>::L L;
  typedef typename Lanes<T>::Int Int;
  constexpr int W = kWidth * 4 / sizeof(T);
  constexpr int kChains = 4;  // comparisons that do not wait for one another
  constexpr T kZero = -static_cast<T>(__builtin_inf());
  const int64_t size = thin_rows(p), down = parts(p.rows, size), depth = p.depth;
  const int64_t batch = item / down, i0 = item % down * size;
  const int64_t last = i0 + size < p.rows ? i0 + size : p.rows;
  const T* b = static_cast<const T*>(p.b) + batch * depth * p.columns;
  T* across = reinterpret_cast<T*>(scratch);  // the right operand, transposed
  bool bad_column[kThin] = {};
  for (int64_t j = 0; j < p.columns; ++j)
    for (int64_t k = 0; k < depth; ++k) {
      const T x = b[k * p.columns + j];
      across[j * depth + k] = x;
      bad_column[j] |= x != x;
    }
  I lane;
  for (int l = 0; l < W; ++l) lane[l] = l;
  for (int64_t i = i0; i < last; ++i) {
    const T* a = static_cast<const T*>(p.a) + (batch * p.rows + i) * depth;
    for (int64_t j = 0; j < p.columns; ++j) {
      const T* column = across + j * depth;
      V best[kChains];
      I at[kChains], bad = {};
      for (int u = 0; u < kChains; ++u) best[u] = kZero - (V){}, at[u] = (Int)-1 - (I){};
      int64_t k = 0;
      for (; k + kChains * W <= depth; k += kChains * W)
#pragma GCC unroll 4
        for (int u = 0; u < kChains; ++u) {
          const V x = *reinterpret_cast<const L*>(a + k + u * W);
          const V term = x + *reinterpret_cast<const L*>(column + k + u * W);
          const I greater = term > best[u];
          bad |= x != x;
          best[u] = greater ? term : best[u];
          if (kIndex) at[u] = greater ? lane + (Int)(k + u * W) : at[u];
        }
      T most = kZero;
      Int where = -1;
      bool nan = bad_column[j];
      for (int u = 0; u < kChains; ++u)
        for (int l = 0; l < W; ++l) {
          nan |= bad[l] != 0;
          if (best[u][l] > most || (best[u][l] == most && at[u][l] < where)) most = best[u][l], where = at[u][l];
        }
      for (; k < depth; ++k) {
        const T term = a[k] + column[k];
        nan |= a[k] != a[k];
        if (term > most) most = term, where = (Int)k;
      }
      const int64_t to = (batch * p.rows + i) * p.columns + j;
      static_cast<T*>(p.out)[to] = nan ? static_cast<T>(__builtin_nan("")) : most + T(0);
      if (kIndex) p.index[to] = nan ? -1 : int32_t(where);
    }
  }
}

}  // namespace CAPIBARA_ISA
