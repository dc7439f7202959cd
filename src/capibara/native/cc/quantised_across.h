// Few vectors across, each code read once for as many vectors as registers hold the sums of, and for all of them where
// there are many. An item has some rows, and sums of its own, as long as a row.
#pragma once

#include "quantised_thin.h"

namespace CAPIBARA_ISA {

// What codes of R rows are multiplied by for N vectors: their scale times the vector's number, [R][N][groups].
template <bool kCoded, int R, int N>
static inline void scale_vectors(const CodesProduct& p, int64_t row, int64_t vector, float* to) {
  const int64_t groups = p.w.groups;
  for (int r = 0; r < R; ++r) {
    const KnownScales<kCoded> scales(p.w, row + r);
    float x[N];
    for (int n = 0; n < N; ++n) x[n] = p.x[(vector + n) * p.w.rows + row + r];
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int64_t g = 0; g < groups; ++g) to[(r * N + n) * groups + g] = scales[g] * x[n];
  }
}

template <int R, int N>
static inline void scaled_vectors(const CodesProduct& p, int64_t row, int64_t vector, float* to) {
  p.w.scales == nullptr ? scale_vectors<true, R, N>(p, row, vector, to)
                        : scale_vectors<false, R, N>(p, row, vector, to);
}

// V vectors of columns of R rows, by what each row is multiplied by.
template <typename C, int V, int R, int N>
static inline __attribute__((always_inline)) void add_columns_across(const uint8_t* codes, int64_t width,
                                                                     const typename C::Table& table,
                                                                     const float* factor, int64_t groups, bool begins,
                                                                     float* sums, int64_t inner) {
  Vec total[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[n][v] = begins ? (Vec){} : load(sums + n * inner + v * kWidth);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Vec values[V];
    C::template read<V>(codes + r * width, table, values);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Vec by = splat(factor[(r * N + n) * groups]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) total[n][v] += values[v] * by;
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + n * inner + v * kWidth, total[n][v]);
}

// As halved_groups, across. For several vectors the even columns come first, and then the odd ones: so registers hold
// the sums.
template <typename C, bool kCoded, bool kTwo, int R, int N>
static inline int64_t halved_groups_across(const CodesProduct& p, const typename C::Table& table, int64_t row,
                                           int64_t vector, bool begins, float* sums) {
  constexpr int kVecs = C::kHalved / kWidth;
  constexpr int kOnce = N == 1 ? kVecs : kVecs / 2;
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kHalved;
  const KnownScales<kCoded> scales(w, row);
  const uint8_t* const codes = w.codes + row * w.width;
  Vec x[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) x[r][n] = splat(p.x[(vector + n) * w.rows + row + r]);
  int64_t k = 0;
  for (int64_t g = 0; k < whole; g += kTwo ? 2 : 1) {
    const int64_t stop = kTwo ? k + C::kHalved : least(k + w.group, whole);
    for (; k < stop; k += C::kHalved) {
      bring_next<C, R>(codes, w.width, k);
#pragma GCC unroll 2
      for (int first = 0; first < kVecs; first += kOnce) {
        Vec total[N][kOnce];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
          for (int v = 0; v < kOnce; ++v)
            total[n][v] = begins ? (Vec){} : load(sums + n * inner + k + (first + v) * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec scale = halved_scale<kTwo>(scales, r * w.groups + g);
#pragma GCC unroll 2
          for (int some = 0; some < kOnce; some += kVecs / 2) {
            Vec values[kVecs / 2];
            C::read_halved(codes + C::byte(k) + r * w.width, first + some != 0, table, values);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
              const Vec by = scale * x[r][n];
#pragma GCC unroll 4
              for (int v = 0; v < kVecs / 2; ++v) total[n][some + v] += values[v] * by;
            }
          }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
          for (int v = 0; v < kOnce; ++v) store(sums + n * inner + k + (first + v) * kWidth, total[n][v]);
      }
    }
  }
  return k;
}

template <typename C, bool kHalve, int R, int N>
static inline void whole_groups_across(const CodesProduct& p, const typename C::Table& table, int64_t row,
                                       int64_t vector, bool begins, float* sums, float* factors) {
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kChunk;
  const uint8_t* const codes = w.codes + row * w.width;
  int64_t k = 0;
  if constexpr (kHalve) {
    const auto halved = [&](auto kernel) { k = kernel(p, table, row, vector, begins, sums); };
    const bool coded = w.scales == nullptr;
    if (w.group == C::kHalved / 2)
      coded ? halved(halved_groups_across<C, true, true, R, N>) : halved(halved_groups_across<C, false, true, R, N>);
    else
      coded ? halved(halved_groups_across<C, true, false, R, N>) : halved(halved_groups_across<C, false, false, R, N>);
  }
  if (k < inner) scaled_vectors<R, N>(p, row, vector, factors);
  for (int64_t g = k / w.group; k < whole; ++g) {
    const int64_t stop = least((g + 1) * w.group, whole);
    const float* const factor = factors + g;
    constexpr int64_t kOnce = C::kMostVecs * kWidth;
    for (; k + kOnce <= stop; k += kOnce) {
      bring_next<C, R>(codes, w.width, k);
      add_columns_across<C, C::kMostVecs, R, N>(codes + C::byte(k), w.width, table, factor, w.groups, begins, sums + k,
                                                inner);
    }
    for (; k < stop; k += C::kChunk) {
      bring_next<C, R>(codes, w.width, k);
      add_columns_across<C, C::kVecs, R, N>(codes + C::byte(k), w.width, table, factor, w.groups, begins, sums + k,
                                            inner);
    }
  }
  for (int n = 0; begins && n < N; ++n)
    for (int64_t k = whole; k < inner; ++k) sums[n * inner + k] = 0;
  for (int r = 0; r < R; ++r)
    for (int64_t k = whole; k < inner; ++k) {
      const float level = C::level(w, codes + r * w.width, k);
      for (int n = 0; n < N; ++n) sums[n * inner + k] += level * factors[(r * N + n) * w.groups + k / w.group];
    }
}

// Rows from `row` on for N vectors, R at a time; the first one that is left. The `first` ones begin the sums.
template <typename C, bool kHalve, int R, int N>
static inline int64_t rows_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t row,
                                  int64_t last, int64_t vector, float* sums, float* factors) {
  for (; row + R <= last; row += R)
    whole_groups_across<C, kHalve, R, N>(p, table, row, vector, row == first, sums, factors);
  return row;
}

template <typename C, bool kHalve, int N>
static void groups_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t last,
                          int64_t vector, float* sums, float* factors) {
  constexpr int kRowsAbreast = N > 1 ? kSeveralAbreast : kHalve ? kAbreastHalved : kAbreastAcross;
  static_assert(kRowsAbreast * N <= kAbreastAcross * kTogetherAcross, "codes_scratch has room for so many factors");
  const int64_t row = rows_across<C, kHalve, kRowsAbreast, N>(p, table, first, first, last, vector, sums, factors);
  rows_across<C, kHalve, 1, N>(p, table, first, row, last, vector, sums, factors);
}

// Vectors one after the other, as many at once as registers hold the sums of.
template <typename C, bool kHalve>
static void vectors_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t last,
                           float* sums, float* factors) {
  int64_t n = 0;
  for (; n + kTogetherAcross <= p.count; n += kTogetherAcross)
    groups_across<C, kHalve, kTogetherAcross>(p, table, first, last, n, sums + n * p.w.inner, factors);
  for (; n < p.count; ++n) groups_across<C, kHalve, 1>(p, table, first, last, n, sums + n * p.w.inner, factors);
}

// For more vectors than two rounds of these take, a block of the matrix becomes numbers once:
// [kBlockRows][kBlockColumns].
constexpr int64_t kBlockRows = 16, kBlockColumns = 256;

// V vectors of columns of a block's rows, times N vectors.
template <int V, int N>
static inline __attribute__((always_inline)) void add_block(const float* block, int64_t height, const float* x,
                                                            int64_t rows, bool begins, float* sums, int64_t inner) {
  Vec total[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) total[n][v] = begins ? (Vec){} : load(sums + n * inner + v * kWidth);
#pragma GCC unroll 4
  for (int64_t r = 0; r < height; ++r) {
    Vec row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) row[v] = load(block + r * kBlockColumns + v * kWidth);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Vec by = splat(x[n * rows + r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) total[n][v] += by * row[v];
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sums + n * inner + v * kWidth, total[n][v]);
}

template <int N>
static void multiply_block(const float* block, int64_t height, int64_t width, const float* x, int64_t rows, bool begins,
                           float* sums, int64_t inner) {
  int64_t j = 0;
  for (; j + 2 * kWidth <= width; j += 2 * kWidth)
    add_block<2, N>(block + j, height, x, rows, begins, sums + j, inner);
  for (; j + kWidth <= width; j += kWidth) add_block<1, N>(block + j, height, x, rows, begins, sums + j, inner);
  for (; j < width; ++j)
    for (int n = 0; n < N; ++n) {
      float total = begins ? 0 : sums[n * inner + j];
      for (int64_t r = 0; r < height; ++r) total += block[r * kBlockColumns + j] * x[n * rows + r];
      sums[n * inner + j] = total;
    }
}

// Numbers of one group are multiplied by their scale times the vector's number, as for fewer vectors; where a group is
// not whole chunks, they have been multiplied by their scales already.
template <typename C>
static void blocks_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t last,
                          float* sums, float* scratch) {
  const Codes& w = p.w;
  const bool whole = w.group % C::kChunk == 0;
  float* const block = scratch;
  float* const factors = scratch + kBlockRows * kBlockColumns;  // [count][kBlockRows]
  for (int64_t begin = 0; begin < w.inner; begin += kBlockColumns) {
    const int64_t width = least(kBlockColumns, w.inner - begin);
    for (int64_t row = first; row < last; row += kBlockRows) {
      const int64_t height = least(kBlockRows, last - row);
      for (int64_t r = 0; r < height; ++r) {
        float* const to = block + r * kBlockColumns - begin;
        const uint8_t* const next = w.codes + (row + kBlockRows + r) * w.width;
        for (int64_t b = C::byte(begin); b < C::byte(begin + width); b += 64) __builtin_prefetch(next + b);
        const auto put = [&](int64_t k, const Vec* values) {
          for (int v = 0; v < C::kVecs; ++v) store(to + k + v * kWidth, values[v]);
        };
        const auto last_one = [&](int64_t k, float value) { to[k] = value; };
        if (whole)
          levels<C>(w, table, row + r, begin, begin + width, put, last_one);
        else
          numbers<C>(w, table, row + r, begin, begin + width, put, last_one);
      }
      for (int64_t k = 0, stop = width; k < width; k = stop, stop = width) {
        const float* x = p.x + row;
        int64_t down = w.rows;
        if (whole) {
          const int64_t g = (begin + k) / w.group;
          stop = least((g + 1) * w.group - begin, width);
          float scales[kBlockRows];
          for (int64_t r = 0; r < height; ++r) scales[r] = Scales(w, row + r)[g];
          for (int64_t n = 0; n < p.count; ++n)
            for (int64_t r = 0; r < height; ++r) factors[n * kBlockRows + r] = scales[r] * x[n * w.rows + r];
          x = factors, down = kBlockRows;
        }
        for (int64_t n = 0; n < p.count; n += 4) {
          float* const to = sums + n * w.inner + begin + k;
          const auto multiply = [&](auto kernel) {
            kernel(block + k, height, stop - k, x + n * down, down, row == first, to, w.inner);
          };
          switch (least(p.count - n, 4)) {
            case 1: multiply(multiply_block<1>); break;
            case 2: multiply(multiply_block<2>); break;
            case 3: multiply(multiply_block<3>); break;
            default: multiply(multiply_block<4>); break;
          }
        }
      }
    }
  }
}

// Whether sums of whole blocks of columns are halved.
template <typename C>
static inline bool are_halved_across(const CodesProduct& p) {
  return p.count <= 2 * kTogetherAcross && is_halved<C>(p.w);
}

template <typename C>
static void thin_across(const CodesProduct& p, int64_t item, float* scratch) {
  const Codes& w = p.w;
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, w.rows);
  const typename C::Table table(w);
  float* const mine = p.room + item * p.count * w.inner;
  if (p.count > 2 * kTogetherAcross) return blocks_across<C>(p, table, first, last, mine, scratch);
  if constexpr (C::kHalved != 0)
    if (are_halved_across<C>(p)) return vectors_across<C, true>(p, table, first, last, mine, scratch);
  if (w.group % C::kChunk == 0) return vectors_across<C, false>(p, table, first, last, mine, scratch);
  for (int64_t k = 0; k < p.count * w.inner; ++k) mine[k] = 0;
  for (int64_t row = first; row < last; ++row)
    for (int64_t n = 0; n < p.count; ++n) {
      float* const sums = mine + n * w.inner;
      const float x = p.x[n * w.rows + row];
      numbers<C>(
          w, table, row, 0, w.inner,
          [&](int64_t k, const Vec* values) {
            for (int v = 0; v < C::kVecs; ++v)
              store(sums + k + v * kWidth, load(sums + k + v * kWidth) + values[v] * splat(x));
          },
          [&](int64_t k, float value) { sums[k] += value * x; });
    }
}

// A vector's sums of all items, in the order of columns: `count` of them from `first` on, both of them multiples of 64,
// or up to the row's end.
template <typename C>
static void finish_thin(const CodesProduct& p, int64_t n, int64_t first, int64_t count) {
  const int64_t inner = p.w.inner, whole = inner - inner % C::kChunk, items = parts(p.w.rows, thin_share(p));
  const int64_t end = first + count;
  const float* const from = p.room + n * inner;
  float* const to = p.out + n * inner;
  const int64_t step = p.count * inner;
  const auto add = [&](int64_t k, int vecs, Vec* total) {
    for (int v = 0; v < vecs; ++v) total[v] = (Vec){};
    for (int64_t item = 0; item < items; ++item)
      for (int v = 0; v < vecs; ++v) total[v] += load(from + item * step + k + v * kWidth);
  };
  int64_t k = first;
  if constexpr (C::kHalved != 0)
    if (are_halved_across<C>(p))
      for (; k + C::kHalved <= end; k += C::kHalved) {
        Vec total[C::kHalved / kWidth];
        add(k, C::kHalved / kWidth, total);
        C::unhalve(total, to + k);
      }
  for (; k < least(whole, end); k += C::kChunk) {
    Vec total[2];
    add(k, C::kVecs, total);
    if (C::kVecs == 1) {
      store(to + k, total[0]);
    } else {
      const IntVec place = lanes() / 2 + (lanes() & 1) * kWidth;
      store(to + k, pick(total[0], total[1], place));
      store(to + k + kWidth, pick(total[0], total[1], place + kWidth / 2));
    }
  }
  for (; k < end; ++k) {
    float found = 0;
    for (int64_t item = 0; item < items; ++item) found += from[item * step + k];
    to[k] = found;
  }
}

}  // namespace CAPIBARA_ISA
