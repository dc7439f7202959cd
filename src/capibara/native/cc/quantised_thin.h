// Few vectors: what takes the time is reading the codes, and making numbers of them. Each code is read once for as many
// vectors as registers hold the sums of, several rows at a time so that sums do not wait for one another; across, for
// all of them where there are many.
#pragma once

#include "fetch.h"
#include "quantised_decode.h"

namespace CAPIBARA_ISA {

using capibara::CodesProduct;

constexpr int kTogether = 4;            // vectors
constexpr int64_t kThinWork = 1 << 15;  // codes that are worth an item
#if defined(__AVX512F__)
constexpr int kAbreast = 4;  // rows
#else
constexpr int kAbreast = 2;
#endif

// Across:
constexpr int kTogetherAcross = kWidth >= 16 ? 4 : 2;
constexpr int kAbreastAcross = 8;  // rows for one vector; for several half as many

// Rows of an item.
static int64_t thin_share(const CodesProduct& p) {
  const int64_t worth = parts(kThinWork, most(p.w.inner, 1));
  const int64_t even = parts(p.w.rows, (p.across ? 2 : 4) * most(p.threads, 1));
  return up(most(even, worth), p.across ? kAbreastAcross : kAbreast);
}

// The scales of some rows, known to be codes or not to be: asking for each would take as long as what it is for.
template <bool kCoded>
struct KnownScales {
  const float* plain;
  const uint8_t* codes;
  const float* table;
  KnownScales(const Codes& w, int64_t row)
      : plain(kCoded ? nullptr : w.scales + row * w.groups),
        codes(kCoded ? w.scale_codes + row * w.groups : nullptr),
        table(w.table) {}
  inline float operator[](int64_t i) const { return kCoded ? table[codes[i]] : plain[i]; }
};

// A chunk of a vector, arranged.
template <typename C>
static inline void arrange_chunk(const float* from, Vec* to) {
  const Vec a = load(from);
  if constexpr (C::kVecs == 1) {
    to[0] = a;
  } else {
    const Vec b = load(from + kWidth);
    to[0] = pick(a, b, 2 * lanes());
    to[1] = pick(a, b, 2 * lanes() + 1);
  }
}

// A row times a vector, each number scaled before it is multiplied.
template <typename C>
static __attribute__((noinline)) float scaled_first(const Codes& w, const typename C::Table& table, int64_t row,
                                                    const float* x) {
  Vec total = {};
  float found = 0;
  numbers<C>(
      w, table, row, 0, w.inner,
      [&](int64_t k, const Vec* values) {
        Vec by[C::kVecs];
        arrange_chunk<C>(x + k, by);
        for (int v = 0; v < C::kVecs; ++v) total += values[v] * by[v];
      },
      [&](int64_t k, float value) { found += value * x[k]; });
  return found + sum(total);
}

// V vectors of columns of R rows, times N vectors.
template <typename C, int V, int R, int N>
static inline __attribute__((always_inline)) void add_columns(const uint8_t* codes, int64_t width,
                                                              const typename C::Table& table, const float* x,
                                                              int64_t inner, const Vec (&scale)[R], Vec (&part)[R],
                                                              Vec (&total)[R][N]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Vec values[V];
    C::template read<V>(codes + r * width, table, values);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if (N == 1) {
        part[r] += values[v] * load(x + v * kWidth);
      } else {
        const Vec value = values[v] * scale[r];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) total[r][n] += value * load(x + n * inner + v * kWidth);
      }
    }
  }
}

// Brings the rows nearer that are read after these R, when a line of the cache begins: in the order in which they lie.
template <typename C, int R>
static inline __attribute__((always_inline)) void bring_next(const uint8_t* codes, int64_t width, int64_t k) {
  if (C::byte(k) % 64 == 0)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) __builtin_prefetch(codes + R * width + R * C::byte(k) + 64 * r);
}

// A number in each half of a vector.
static inline __attribute__((always_inline)) Vec halves(float lower, float upper) {
  return pick(splat(lower), splat(upper), lanes() + (lanes() & (kWidth / 2)) * 2);
}

// Whether whole blocks of columns are read halved.
template <typename C>
static inline bool is_halved(const Codes& w) {
  return w.group == C::kHalved / 2 || w.group % C::kHalved == 0;
}

// R rows times N vectors, columns that are halved: of two groups at once where they are as long as a half. The column
// after the last of them.
template <typename C, bool kCoded, bool kTwo, int R, int N>
static inline __attribute__((always_inline)) int64_t halved_groups(const Codes& w, const typename C::Table& table,
                                                                   const KnownScales<kCoded>& scales,
                                                                   const uint8_t* codes, const float* x,
                                                                   Vec (&total)[R][N]) {
  constexpr int kVecs = C::kHalved / kWidth;
  const int64_t whole = w.inner - w.inner % C::kHalved;
  int64_t k = 0;
  for (int64_t g = 0; k < whole; g += kTwo ? 2 : 1) {
    const int64_t stop = kTwo ? k + C::kHalved : least(k + w.group, whole);
    Vec scale[R], part[R][2];
    bool begins = true;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      scale[r] = kTwo ? halves(scales[r * w.groups + g], scales[r * w.groups + g + 1]) : splat(scales[r * w.groups + g]);
    for (; k < stop; k += C::kHalved) {
      bring_next<C, R>(codes, w.width, k);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec values[kVecs];
        C::read_halved(codes + C::byte(k) + r * w.width, table, values);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          if (N == 1) {
            const Vec product = values[v] * load(x + k + v * kWidth);
            Vec& to = part[r][v / (kVecs / 2)];
            to = v % (kVecs / 2) == 0 && (kTwo || begins) ? product : to + product;
          } else {
            const Vec value = values[v] * scale[r];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) total[r][n] += value * load(x + n * w.inner + k + v * kWidth);
          }
        }
      }
      begins = false;
    }
    if (N == 1)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[r][0] += (part[r][0] + part[r][1]) * scale[r];
  }
  return k;
}

// R rows times N vectors, whose groups are whole chunks.
template <typename C, bool kCoded, int R, int N>
static inline void whole_groups(const CodesProduct& p, const typename C::Table& table, int64_t row, const float* plain,
                                const float* x, float* out) {
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kChunk;
  const KnownScales<kCoded> scales(w, row);
  const uint8_t* const codes = w.codes + row * w.width;
  Vec total[R][N] = {};
  int64_t k = 0;
  if constexpr (C::kHalved != 0) {
    if (w.group == C::kHalved / 2)
      k = halved_groups<C, kCoded, true, R, N>(w, table, scales, codes, x, total);
    else if (w.group % C::kHalved == 0)
      k = halved_groups<C, kCoded, false, R, N>(w, table, scales, codes, x, total);
  }
  for (int64_t g = k / w.group; k < whole; ++g) {
    const int64_t stop = least((g + 1) * w.group, whole);
    Vec scale[R], part[R] = {};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) scale[r] = splat(scales[r * w.groups + g]);
    constexpr int64_t kOnce = C::kMostVecs * kWidth;
    for (; k + kOnce <= stop; k += kOnce) {
      bring_next<C, R>(codes, w.width, k);
      add_columns<C, C::kMostVecs, R, N>(codes + C::byte(k), w.width, table, x + k, inner, scale, part, total);
    }
    for (; k < stop; k += C::kChunk) {
      bring_next<C, R>(codes, w.width, k);
      add_columns<C, C::kVecs, R, N>(codes + C::byte(k), w.width, table, x + k, inner, scale, part, total);
    }
    if (N == 1)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[r][0] += part[r] * scale[r];
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float found = sum(total[r][n]);
      for (int64_t k = whole; k < inner; ++k)
        found += C::level(w, codes + r * w.width, k) * scales[r * w.groups + k / w.group] * x[n * inner + k];
      // What a group's sum without its scale is too large for may be finite with it.
      if (N == 1 && !(found - found == 0)) found = scaled_first<C>(w, table, row + r, plain);
      out[n * w.rows + r] = found;
    }
}

template <typename C, int N>
static void thin_rows(const CodesProduct& p, int64_t first, int64_t last, const float* plain, const float* x, float* out,
                      float* scratch) {
  const Codes& w = p.w;
  const int64_t inner = w.inner;
  const typename C::Table table(w);
  int64_t row = first;
  if (w.group % C::kChunk == 0) {
    if (w.scales == nullptr) {
      for (; row + kAbreast <= last; row += kAbreast) whole_groups<C, true, kAbreast, N>(p, table, row, plain, x, out + row);
      for (; row < last; ++row) whole_groups<C, true, 1, N>(p, table, row, plain, x, out + row);
    } else {
      for (; row + kAbreast <= last; row += kAbreast) whole_groups<C, false, kAbreast, N>(p, table, row, plain, x, out + row);
      for (; row < last; ++row) whole_groups<C, false, 1, N>(p, table, row, plain, x, out + row);
    }
    return;
  }
  for (; row < last; ++row) {
    numbers<C>(
        w, table, row, 0, inner,
        [&](int64_t k, const Vec* values) {
          for (int v = 0; v < C::kVecs; ++v) store(scratch + k + v * kWidth, values[v]);
        },
        [&](int64_t k, float value) { scratch[k] = value; });
    for (int n = 0; n < N; ++n) {
      Vec total[2] = {};
      int64_t k = 0;
      for (; k + 2 * kWidth <= inner; k += 2 * kWidth)
        for (int j = 0; j < 2; ++j) total[j] += load(scratch + k + j * kWidth) * load(x + n * inner + k + j * kWidth);
      float found = sum(total[0] + total[1]);
      for (; k < inner; ++k) found += scratch[k] * x[n * inner + k];
      out[n * w.rows + row] = found;
    }
  }
}

// A vector in the order in which a row's codes are read.
template <typename C>
static void arrange(const Codes& w, const float* from, float* to) {
  int64_t k = 0;
  if constexpr (C::kHalved != 0)
    if (is_halved<C>(w))
      for (; k + C::kHalved <= w.inner; k += C::kHalved) C::halve(from + k, to + k);
  for (; k + C::kChunk <= w.inner; k += C::kChunk) {
    Vec chunk[C::kVecs];
    arrange_chunk<C>(from + k, chunk);
    for (int v = 0; v < C::kVecs; ++v) store(to + k + v * kWidth, chunk[v]);
  }
  for (; k < w.inner; ++k) to[k] = from[k];
}

template <typename C>
static void thin(const CodesProduct& p, int64_t item, float* scratch) {
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, p.w.rows);
  const float* x = p.x;
  if (C::kVecs > 1) {
    // Each item anew: that takes less than another round of threads would.
    float* const ordered = scratch + p.w.inner;
    for (int64_t n = 0; n < p.count; ++n) arrange<C>(p.w, x + n * p.w.inner, ordered + n * p.w.inner);
    x = ordered;
  }
  for (int64_t n = 0, together; n < p.count; n += together) {
    // No vector is left alone: its sums would be other ones than beside others.
    together = p.count - n == kTogether + 1 ? kTogether - 1 : least(p.count - n, kTogether);
    const float *const plain = p.x + n * p.w.inner, *const from = x + n * p.w.inner;
    float* const to = p.out + n * p.w.rows;
    switch (together) {
      case 1: thin_rows<C, 1>(p, first, last, plain, from, to, scratch); break;
      case 2: thin_rows<C, 2>(p, first, last, plain, from, to, scratch); break;
      case 3: thin_rows<C, 3>(p, first, last, plain, from, to, scratch); break;
      default: thin_rows<C, 4>(p, first, last, plain, from, to, scratch); break;
    }
  }
}

// Across, each item has some rows and sums of its own, as long as a row.

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

template <typename C, int R, int N>
static inline void whole_groups_across(const CodesProduct& p, const typename C::Table& table, int64_t row,
                                       int64_t vector, bool begins, float* sums, float* factors) {
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kChunk;
  const uint8_t* const codes = w.codes + row * w.width;
  scaled_vectors<R, N>(p, row, vector, factors);
  for (int64_t k = 0, g = 0; k < whole; ++g) {
    const int64_t stop = least(k + w.group, whole);
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
template <typename C, int R, int N>
static inline int64_t rows_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t row,
                                  int64_t last, int64_t vector, float* sums, float* factors) {
  for (; row + R <= last; row += R)
    whole_groups_across<C, R, N>(p, table, row, vector, row == first, sums, factors);
  return row;
}

template <typename C, int N>
static void groups_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t last,
                          int64_t vector, float* sums, float* factors) {
  constexpr int kRowsAbreast = N == 1 ? kAbreastAcross : kAbreastAcross / 2;
  const int64_t row = rows_across<C, kRowsAbreast, N>(p, table, first, first, last, vector, sums, factors);
  rows_across<C, 1, N>(p, table, first, row, last, vector, sums, factors);
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

template <typename C>
static void thin_across(const CodesProduct& p, int64_t item, float* scratch) {
  const Codes& w = p.w;
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, w.rows);
  const typename C::Table table(w);
  float* const mine = p.room + item * p.count * w.inner;
  if (p.count > 2 * kTogetherAcross) return blocks_across<C>(p, table, first, last, mine, scratch);
  if (w.group % C::kChunk == 0) {
    int64_t n = 0;
    for (; n + kTogetherAcross <= p.count; n += kTogetherAcross)
      groups_across<C, kTogetherAcross>(p, table, first, last, n, mine + n * w.inner, scratch);
    for (; n < p.count; ++n) groups_across<C, 1>(p, table, first, last, n, mine + n * w.inner, scratch);
    return;
  }
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

// A vector's sums of all items, from a column on that begins a chunk, in the order of columns.
template <typename C>
static void finish_thin(const CodesProduct& p, int64_t n, int64_t first, int64_t count) {
  const int64_t inner = p.w.inner, whole = inner - inner % C::kChunk, items = parts(p.w.rows, thin_share(p));
  const int64_t end = first + count;
  const float* const from = p.room + n * inner;
  float* const to = p.out + n * inner;
  const int64_t step = p.count * inner;
  int64_t k = first;
  for (; k < least(whole, end); k += C::kChunk) {
    Vec total[2] = {};
    for (int64_t item = 0; item < items; ++item)
      for (int v = 0; v < C::kVecs; ++v) total[v] += load(from + item * step + k + v * kWidth);
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

static bool fetch_thin(const CodesProduct& p, int64_t item, int64_t part) {
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, p.w.rows);
  const uint8_t* const codes = p.w.codes + first * p.w.width;
  const int64_t bytes = (last - first) * p.w.width;
  for (int64_t j = part * kPart; j < least((part + 1) * kPart, bytes); j += 64) __builtin_prefetch(codes + j, 0, 2);
  return part + 1 < least(parts(bytes, kPart), kMostParts);
}

}  // namespace CAPIBARA_ISA
