// Max-plus matrix product, for one instruction set.
//
// A register tile of the result runs over the depth, as in an ordinary matrix product; addition takes the place of
// the multiplication and the maximum that of the sum. A block of the right operand is packed into panels as wide as
// the tile. The maximum ignores NaN, so that -inf + inf counts as nothing: the zero of the semiring wins. An entry
// that reads a NaN has one anywhere in its row of the left operand or its column of the right one; these are found
// apart before, and marked at the end.
#include "tropical.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Tropical;

constexpr int64_t kDepth = 256;         // of a packed block
constexpr int64_t kColumns = 256;       // of an item
constexpr int64_t kRowStep = kDepth + 16;  // not a power of two: rows of a tile would meet in the cache
constexpr int64_t kChunk = 120;         // rows whose left operand stays in the second-level cache
constexpr int64_t kMostRows = 5 * kChunk;  // of an item

// An addition competes with a floating-point maximum for the same units on AMD's Zen, while others stand idle. With
// 512-bit vectors the sum is taken where products are (see plus). With 256-bit ones the maximum is taken where integers
// are: among numbers of which one at least is not negative the greatest integer is the greatest number; among negative
// ones, the least is.
enum class By { kFloat, kSigned, kNegative };
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kIntegers = true;
constexpr int kSteps = 4;  // of the depth, in one turn of the innermost loop
#else
constexpr bool kIntegers = false;
constexpr int kSteps = 1;
#endif

// Of the depth, after which an entry's index is noted: to compare indices in each step takes as long as the product.
// Which of these steps it was is found in the end, for what an item's packed block has made greater.
constexpr int kNoted = 16;

template <By kBy>
constexpr int kTileRows = kBy == By::kFloat ? kRows : 4;

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

// Integer maxima are associative, and compilers put them in another order, for which there are not enough registers.
template <typename V>
static inline V opaque(V x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}

#if defined(__AVX512F__)
// *x + row as the fused one * *x + row: the same number, rounded once. A number that is spread over a register first
// would take a turn of the units which compare; as an operand in memory it does not, and compilers choose the register.
// On Zen 4 this and the maximum are twice as fast as an addition and the maximum are (205 instead of 110 billion
// operations a second, on two cores).
static inline Lanes<float>::V plus(const float* x, Lanes<float>::V row, Lanes<float>::V one) {
  asm("vfmadd132ps %2%{1to16%}, %1, %0" : "+v"(one) : "v"(row), "m"(*x));
  return one;
}
static inline Lanes<double>::V plus(const double* x, Lanes<double>::V row, Lanes<double>::V one) {
  asm("vfmadd132pd %2%{1to8%}, %1, %0" : "+v"(one) : "v"(row), "m"(*x));
  return one;
}
#else
template <typename T, typename V>
static inline V plus(const T* x, V row, V) {
  return *x - (V){} + row;
}
#endif

// One bit for each lane of a comparison.
template <typename T, typename I>
static inline uint32_t bits(I mask) {
  constexpr int W = kWidth * 4 / sizeof(T);
#if defined(__AVX512F__)
  uint16_t found;
  if (sizeof(T) == 4)
    asm("vptestmd %1, %1, %0" : "=k"(found) : "v"(mask));
  else
    asm("vptestmq %1, %1, %0" : "=k"(found) : "v"(mask));
  return W == 16 ? found : found & 0xff;
#elif defined(__AVX2__)
  typedef double Pairs __attribute__((vector_size(32)));
  typedef float Singles __attribute__((vector_size(32)));
  if (sizeof(T) == 4) return uint32_t(__builtin_ia32_movmskps256((Singles)mask));
  return uint32_t(__builtin_ia32_movmskpd256((Pairs)mask));
#elif defined(__SSE2__)
  typedef double Pairs __attribute__((vector_size(16)));
  typedef float Singles __attribute__((vector_size(16)));
  if (sizeof(T) == 4) return uint32_t(__builtin_ia32_movmskps((Singles)mask));
  return uint32_t(__builtin_ia32_movmskpd((Pairs)mask));
#else
  uint32_t found = 0;
  for (int l = 0; l < W; ++l) found |= uint32_t(mask[l] & 1) << l;
  return found;
#endif
}

template <By kBy, typename I, typename V>
static inline I greater(V x, V y) {
  if (kBy == By::kFloat) return x > y;
  return kBy == By::kSigned ? (I)x > (I)y : (I)x < (I)y;
}

template <typename T, int R, By kBy, bool kIndex>
static inline void max_plus(int64_t depth, const T* a, const T* panel, T* c, typename Lanes<T>::Int* index,
                            int64_t c_step, int64_t first) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  typedef typename Lanes<T>::L L;
  typedef typename Lanes<T>::LI LI;
  constexpr int W = kWidth * 4 / sizeof(T);
  const V one = T(1) - (V){};
  V best[R][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) best[r][j] = *reinterpret_cast<const L*>(c + r * c_step + j * W);
  for (int64_t begin = 0, end = depth; begin < depth; begin = end) {
    end = kIndex && depth - begin > kNoted ? begin + kNoted : depth;
    for (int64_t turn = begin; turn < end; turn += kSteps) {
#pragma GCC unroll 8
      for (int64_t k = turn; k < turn + kSteps; ++k) {
        V row[kVectors];
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) row[j] = *reinterpret_cast<const L*>(panel + (k * kVectors + j) * W);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int j = 0; j < kVectors; ++j) {
            const V term = plus(a + r * kRowStep + k, row[j], one), old = best[r][j];
            best[r][j] = greater<kBy, I>(term, old) ? term : old;
            if (kBy != By::kFloat) best[r][j] = opaque(best[r][j]);
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        L* const to = reinterpret_cast<L*>(c + r * c_step + j * W);
        if (kIndex) {
          LI* const at = reinterpret_cast<LI*>(index + r * c_step + j * W);
          *at = greater<kBy, I>(best[r][j], (V)*to) ? (typename Lanes<T>::Int)(first + begin) - (I){} : (I)*at;
        }
        *to = best[r][j];
      }
  }
}

template <typename T, int R, By kBy, bool kIndex>
struct UpTo {
  static void run(int rows, int64_t depth, const T* a, const T* panel, T* c, typename Lanes<T>::Int* index,
                  int64_t c_step, int64_t first) {
    if (rows == R)
      max_plus<T, R, kBy, kIndex>(depth, a, panel, c, index, c_step, first);
    else
      UpTo<T, R - 1, kBy, kIndex>::run(rows, depth, a, panel, c, index, c_step, first);
  }
};
template <typename T, By kBy, bool kIndex>
struct UpTo<T, 0, kBy, kIndex> {
  static void run(int, int64_t, const T*, const T*, T*, typename Lanes<T>::Int*, int64_t, int64_t) {}
};

static int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
static int64_t up(int64_t n, int64_t size) { return parts(n, size) * size; }
static int64_t whole_turns(int64_t depth) { return up(depth, kSteps); }

// Rows of an item: as many as may be, since every item packs the right operand anew; but some items for each thread.
static int64_t share(const Tropical& p) {
  const int64_t others = p.batch * parts(p.columns, kColumns);
  int64_t count = parts(p.rows, kMostRows);
  const int64_t wanted = parts(4 * p.threads, others), most = parts(p.rows, kChunk);
  if (count < wanted) count = wanted < most ? wanted : most;
  return parts(p.rows, count);
}

}  // namespace CAPIBARA_ISA

#include "tropical_thin.h"

namespace CAPIBARA_ISA {

static int64_t tropical_items(const Tropical& p) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return 0;
  if (is_thin(p)) return p.batch * parts(p.rows, thin_rows(p));
  return p.batch * parts(p.rows, share(p)) * parts(p.columns, kColumns);
}

static int64_t tropical_scratch(const Tropical& p, int64_t bytes) {
  if (tropical_items(p) == 0) return 0;
  if (is_thin(p)) return (p.columns * p.depth + 1) * (bytes / 4);
  const int64_t rows = share(p);
  const int64_t results = rows * kColumns, for_indices = p.index == nullptr ? 0 : results + kColumns * kRowStep;
  return (kDepth * kColumns + kChunk * kRowStep + results + kColumns + rows + for_indices) * (bytes / 4);
}

// One item: a block of the result, and the scratch for it.
template <typename T>
struct Block {
  typedef typename Lanes<T>::Int Int;
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::I I;
  typedef typename Lanes<T>::L L;
  typedef typename Lanes<T>::LI LI;
  static constexpr int64_t kWide = kVectors * kWidth * 4 / sizeof(T);
  static constexpr T kZero = -static_cast<T>(__builtin_inf());
  int64_t rows, columns, depth;
  const T *a, *b;  // of the block's first row and column
  int64_t b_step;
  T *panels, *tiles, *c, *across;  // across: the packed block of the right operand, transposed
  Int *index, *bad_columns, *bad_rows;

  // True if no number is positive.
  bool all_negative() const {
    Int positive = 0;
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t j = 0; j < columns; ++j) positive |= b[k * b_step + j] > 0;
    for (int64_t n = 0; n < rows * depth; ++n) positive |= a[n] > 0;
    return !positive;
  }

  // True if a few entries of the result, from three of its rows, are all at least 0.
  bool sample_is_positive() const {
    constexpr int64_t kTry = 16;
    for (int64_t i = 0; i < rows; i += parts(rows, 3)) {
      T best[kTry];
      const int64_t count = columns < kTry ? columns : kTry;
      for (int64_t j = 0; j < kTry; ++j) best[j] = -1;
      for (int64_t k = 0; k < depth; ++k) {
        const T x = a[i * depth + k];
        for (int64_t j = 0; j < count; ++j) {
          const T term = x + b[k * b_step + j];
          best[j] = term > best[j] ? term : best[j];
        }
      }
      for (int64_t j = 0; j < count; ++j)
        if (best[j] < 0) return false;
    }
    return true;
  }

  // Zero is written as the integer comparison wants it: -0 among negative numbers, else +0.
  template <By kBy, typename X>
  static X as_packed(X x) {
    if (kBy == By::kNegative) return (X)((I)x | (I)(V)(T(-0.0) - (V){}));
    return kBy == By::kSigned ? x + T(0) : x;
  }

  // Copies `count` numbers, and fills up to `room` with the semiring's zero. Notes which are NaN: each in its place of
  // `bad`, or (kOne) all of them in the first.
  template <By kBy, bool kOne>
  static void copy(const T* from, int64_t count, T* to, int64_t room, Int* bad) {
    constexpr int W = kWidth * 4 / sizeof(T);
    I found = {};
    int64_t n = 0;
    for (; n + W <= count; n += W) {
      const V x = *reinterpret_cast<const L*>(from + n);
      *reinterpret_cast<L*>(to + n) = as_packed<kBy>(x);
      if (kOne)
        found |= x != x;
      else
        *reinterpret_cast<LI*>(bad + n) |= x != x;
    }
    if (kOne)
      for (int l = 0; l < W; ++l) *bad |= found[l];
    for (; n < room; ++n) {
      to[n] = n < count ? as_packed<kBy>(from[n] - (V){})[0] : kZero;
      bad[kOne ? 0 : n] |= to[n] != to[n];
    }
  }

  template <By kBy, bool kIndex>
  void pack_columns(int64_t k0, int64_t count) {
    const int64_t turns = whole_turns(count);
    for (int64_t k = 0; k < turns; ++k)
      for (int64_t j = 0; j < columns; j += kWide) {
        const int64_t there = k >= count ? 0 : columns - j < kWide ? columns - j : kWide;
        copy<kBy, false>(b + (k0 + k) * b_step + j, there, panels + j * turns + k * kWide, kWide, bad_columns + j);
      }
    if (!kIndex) return;
    for (int64_t j = 0; j < columns; ++j) {
      const T* from = panels + j / kWide * kWide * turns + j % kWide;
      for (int64_t k = 0; k < up(count, kNoted); ++k) across[j * kRowStep + k] = k < count ? from[k * kWide] : kZero;
    }
  }

  template <By kBy>
  void pack_rows(int64_t i0, int64_t height, int64_t k0, int64_t count) {
    for (int64_t i = 0; i < height; ++i)
      copy<kBy, true>(a + (i0 + i) * depth + k0, count, tiles + i * kRowStep, up(count, kNoted), bad_rows + i0 + i);
  }

  // The exact indices of the entries that this block of the depth has made greater, in rows that are packed. A few
  // columns after another: what is read of them and of a row stays in the first cache.
  void find(int64_t i0, int64_t height, int64_t k0) {
    constexpr int W = kWidth * 4 / sizeof(T);
    for (int64_t j = 0; j < columns; j += W)
      for (int64_t i = 0; i < height; ++i) {
        const T* const most = c + (i0 + i) * kColumns + j;
        Int* const at = index + (i0 + i) * kColumns + j;
        uint32_t now = bits<T>((I)(*reinterpret_cast<const LI*>(at) >= (Int)k0));
        for (; now; now &= now - 1) {
          const int l = __builtin_ctz(now);
          if (j + l >= columns) break;
          const T* x = tiles + i * kRowStep + (at[l] - k0);
          const T* y = across + (j + l) * kRowStep + (at[l] - k0);
          uint64_t same = uint64_t(1) << kNoted;  // where a NaN is there is no other
#pragma GCC unroll 8
          for (int n = 0; n < kNoted; n += W) {
            const V term = *reinterpret_cast<const L*>(x + n) + *reinterpret_cast<const L*>(y + n);
            same |= uint64_t(bits<T>((I)(term == most[l] - (V){}))) << n;
          }
          at[l] += __builtin_ctzll(same);
        }
      }
  }

  template <By kBy, bool kIndex>
  void compute() {
    constexpr int kTile = kTileRows<kBy>;
    for (int64_t n = 0; n < rows * kColumns; ++n) c[n] = kZero;
    for (int64_t j = 0; j < kColumns; ++j) bad_columns[j] = 0;
    for (int64_t i = 0; i < rows; ++i) bad_rows[i] = 0;
    if (kIndex)
      for (int64_t n = 0; n < rows * kColumns; ++n) index[n] = -1;
    for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
      const int64_t count = depth - k0 < kDepth ? depth - k0 : kDepth;
      const int64_t turns = whole_turns(count);
      pack_columns<kBy, kIndex>(k0, count);
      for (int64_t i0 = 0; i0 < rows; i0 += kChunk) {
        const int64_t height = rows - i0 < kChunk ? rows - i0 : kChunk;
        pack_rows<kBy>(i0, height, k0, count);
        for (int64_t j = 0; j < columns; j += kWide)
          for (int64_t i = 0; i < height; i += kTile) {
            const int64_t at = (i0 + i) * kColumns + j;
            UpTo<T, kTile, kBy, kIndex>::run(height - i < kTile ? int(height - i) : kTile, turns,
                                             tiles + i * kRowStep, panels + j * turns, c + at,
                                             kIndex ? index + at : nullptr, kColumns, k0);
          }
        if (kIndex) find(i0, height, k0);
      }
    }
  }

  // False if an entry is negative: the integers may then have chosen a wrong one.
  bool all_positive() const {
    Int negative = 0;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) negative |= !(c[i * kColumns + j] >= 0);
    return !negative;
  }
};

template <typename T, bool kIndex>
static void compute(const Tropical& p, int64_t item, float* scratch) {
  typedef typename Lanes<T>::Int Int;
  const int64_t size = share(p);
  const int64_t across = parts(p.columns, kColumns), down = parts(p.rows, size);
  const int64_t batch = item / (across * down);
  const int64_t i0 = item / across % down * size, j0 = item % across * kColumns;
  Block<T> block;
  block.rows = p.rows - i0 < size ? p.rows - i0 : size;
  block.columns = p.columns - j0 < kColumns ? p.columns - j0 : kColumns;
  block.depth = p.depth;
  block.a = static_cast<const T*>(p.a) + (batch * p.rows + i0) * p.depth;
  block.b = static_cast<const T*>(p.b) + batch * p.depth * p.columns + j0;
  block.b_step = p.columns;
  block.panels = reinterpret_cast<T*>(scratch);
  block.tiles = block.panels + kDepth * kColumns;
  block.c = block.tiles + kChunk * kRowStep;
  block.index = reinterpret_cast<Int*>(block.c + size * kColumns);
  block.bad_columns = block.index + (kIndex ? size * kColumns : 0);
  block.bad_rows = block.bad_columns + kColumns;
  block.across = reinterpret_cast<T*>(block.bad_rows + size);

  bool done = false;
  if constexpr (kIntegers && sizeof(T) == 4) {
    if (block.all_negative()) {
      block.template compute<By::kNegative, kIndex>();
      done = true;
    } else if (!__atomic_load_n(p.some_negative, __ATOMIC_RELAXED) && block.sample_is_positive()) {
      block.template compute<By::kSigned, kIndex>();
      done = block.all_positive();
      // What is lost is lost once: the other items will not try.
      if (!done) __atomic_store_n(p.some_negative, 1, __ATOMIC_RELAXED);
    }
  }
  if (!done) block.template compute<By::kFloat, kIndex>();
  for (int64_t i = 0; i < block.rows; ++i) {
    const Int worse = block.bad_rows[i];
    const int64_t at = (batch * p.rows + i0 + i) * p.columns + j0;
    const T* c = block.c + i * kColumns;
    T* out = static_cast<T*>(p.out) + at;
    for (int64_t j = 0; j < block.columns; ++j)
      out[j] = worse | block.bad_columns[j] ? static_cast<T>(__builtin_nan("")) : c[j] + T(0);
    if (kIndex)
      for (int64_t j = 0; j < block.columns; ++j)
        p.index[at + j] = worse | block.bad_columns[j] ? -1 : int32_t(block.index[i * kColumns + j]);
  }
}

template <typename T>
static void tropical(const Tropical& p, int64_t item, float* scratch) {
  const bool some = p.index != nullptr;
  if (is_thin(p))
    some ? thin<T, true>(p, item, scratch) : thin<T, false>(p, item, scratch);
  else
    some ? compute<T, true>(p, item, scratch) : compute<T, false>(p, item, scratch);
}

extern const capibara::TropicalKernels kTropical;
const capibara::TropicalKernels kTropical = {tropical_items, tropical_scratch, tropical<float>, tropical<double>};

}  // namespace CAPIBARA_ISA
