// Few vectors: what takes the time is reading the codes, and making numbers of them. Each code is read once for up to
// kTogether vectors, several rows at a time so that sums do not wait for one another.
#pragma once

#include "quantised_decode.h"

namespace CAPIBARA_ISA {

using capibara::CodesProduct;

constexpr int64_t kThin = 8;           // vectors
constexpr int kTogether = 4;           // of them
constexpr int64_t kThinWork = 1 << 15;  // codes that are worth an item
#if defined(__AVX512F__)
constexpr int kAbreast = 4;  // rows
#else
constexpr int kAbreast = 2;
#endif

// Rows of an item.
static int64_t thin_share(const CodesProduct& p) {
  const int64_t worth = parts(kThinWork, most(p.w.inner, 1));
  return up(most(parts(p.w.rows, (p.across ? 2 : 4) * most(p.threads, 1)), worth), kAbreast);
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

// A row times a vector, each number scaled before it is multiplied.
template <typename C>
static __attribute__((noinline)) float scaled_first(const Codes& w, const typename C::Table& table, int64_t row,
                                                    const float* x) {
  Vec total = {};
  float found = 0;
  numbers<C>(
      w, table, row, 0, w.inner,
      [&](int64_t k, const Vec* values) {
        for (int v = 0; v < C::kVecs; ++v) total += values[v] * load(x + k + v * kWidth);
      },
      [&](int64_t k, float value) { found += value * x[k]; });
  return found + sum(total);
}

// R rows times N vectors, whose groups are whole chunks.
template <typename C, bool kCoded, int R, int N>
static inline void whole_groups(const CodesProduct& p, const typename C::Table& table, int64_t row, const float* x,
                                float* out) {
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kChunk;
  const KnownScales<kCoded> scales(w, row);
  const uint8_t* const codes = w.codes + row * w.width;
  Vec total[R][N] = {};
  for (int64_t k = 0, g = 0; k < whole; ++g) {
    const int64_t stop = least(k + w.group, whole);
    Vec scale[R], part[R] = {};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) scale[r] = splat(scales[r * w.groups + g]);
    for (; k < stop; k += C::kChunk)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec values[C::kVecs];
        C::read(codes + r * w.width + C::byte(k), table, values);
        // The rows that are read next.
        if (C::byte(k) % 64 == 0) __builtin_prefetch(codes + (R + r) * w.width + C::byte(k));
#pragma GCC unroll 2
        for (int v = 0; v < C::kVecs; ++v) {
          if (N == 1) {
            part[r] += values[v] * load(x + k + v * kWidth);
          } else {
            const Vec value = values[v] * scale[r];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) total[r][n] += value * load(x + n * inner + k + v * kWidth);
          }
        }
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
      if (N == 1 && !(found - found == 0)) found = scaled_first<C>(w, table, row + r, x);
      out[n * w.rows + r] = found;
    }
}

template <typename C, int N>
static void thin_rows(const CodesProduct& p, int64_t first, int64_t last, const float* x, float* out, float* scratch) {
  const Codes& w = p.w;
  const int64_t inner = w.inner;
  const typename C::Table table(w);
  int64_t row = first;
  if (w.group % C::kChunk == 0) {
    if (w.scales == nullptr) {
      for (; row + kAbreast <= last; row += kAbreast) whole_groups<C, true, kAbreast, N>(p, table, row, x, out + row);
      for (; row < last; ++row) whole_groups<C, true, 1, N>(p, table, row, x, out + row);
    } else {
      for (; row + kAbreast <= last; row += kAbreast) whole_groups<C, false, kAbreast, N>(p, table, row, x, out + row);
      for (; row < last; ++row) whole_groups<C, false, 1, N>(p, table, row, x, out + row);
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

template <typename C>
static void thin(const CodesProduct& p, int64_t item, float* scratch) {
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, p.w.rows);
  const float* const x = C::kVecs == 1 ? p.x : p.packed;
  for (int64_t n = 0; n < p.count; n += kTogether) {
    const float* const from = x + n * p.w.inner;
    float* const to = p.out + n * p.w.rows;
    switch (least(p.count - n, kTogether)) {
      case 1: thin_rows<C, 1>(p, first, last, from, to, scratch); break;
      case 2: thin_rows<C, 2>(p, first, last, from, to, scratch); break;
      case 3: thin_rows<C, 3>(p, first, last, from, to, scratch); break;
      default: thin_rows<C, 4>(p, first, last, from, to, scratch); break;
    }
  }
}

// Across, each item has some rows and sums of its own, as long as a row.

// What codes of R rows are multiplied by for N vectors: their scale times the vector's number, [R][N][groups].
template <int R, int N>
static inline void scaled_vectors(const CodesProduct& p, int64_t row, int64_t vector, float* to) {
  for (int r = 0; r < R; ++r) {
    const Scales scales(p.w, row + r);
    float x[N];
    for (int n = 0; n < N; ++n) x[n] = p.x[(vector + n) * p.w.rows + row + r];
    for (int64_t g = 0; g < p.w.groups; ++g) {
      const float scale = scales[g];
      for (int n = 0; n < N; ++n) to[(r * N + n) * p.w.groups + g] = scale * x[n];
    }
  }
}

template <typename C, int R, int N>
static inline void whole_groups_across(const CodesProduct& p, const typename C::Table& table, int64_t row,
                                       int64_t vector, float* sums, float* factors) {
  const Codes& w = p.w;
  const int64_t inner = w.inner, whole = inner - inner % C::kChunk;
  const uint8_t* const codes = w.codes + row * w.width;
  scaled_vectors<R, N>(p, row, vector, factors);
  for (int64_t k = 0, g = 0; k < whole; ++g) {
    const int64_t stop = least(k + w.group, whole);
    const float* const factor = factors + g;
    for (; k < stop; k += C::kChunk) {
      Vec total[N][C::kVecs];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int v = 0; v < C::kVecs; ++v) total[n][v] = load(sums + n * inner + k + v * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Vec values[C::kVecs];
        C::read(codes + r * w.width + C::byte(k), table, values);
        // The rows that are read next.
        if (C::byte(k) % 64 == 0) __builtin_prefetch(codes + (R + r) * w.width + C::byte(k));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const Vec by = splat(factor[(r * N + n) * w.groups]);
#pragma GCC unroll 2
          for (int v = 0; v < C::kVecs; ++v) total[n][v] += values[v] * by;
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int v = 0; v < C::kVecs; ++v) store(sums + n * inner + k + v * kWidth, total[n][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int64_t k = whole; k < inner; ++k) {
      const float level = C::level(w, codes + r * w.width, k);
      for (int n = 0; n < N; ++n) sums[n * inner + k] += level * factors[(r * N + n) * w.groups + k / w.group];
    }
}

constexpr int kTogetherAcross = kWidth >= 16 ? 4 : 2;
constexpr int kAbreastAcross = 8;  // rows for one vector; for several half as many

// Rows from `row` on for N vectors, R at a time; the first one that is left.
template <typename C, int R, int N>
static inline int64_t rows_across(const CodesProduct& p, const typename C::Table& table, int64_t row, int64_t last,
                                  int64_t vector, float* sums, float* factors) {
  for (; row + R <= last; row += R) whole_groups_across<C, R, N>(p, table, row, vector, sums, factors);
  return row;
}

template <typename C, int N>
static void groups_across(const CodesProduct& p, const typename C::Table& table, int64_t first, int64_t last,
                          int64_t vector, float* sums, float* factors) {
  int64_t row = rows_across<C, N == 1 ? kAbreastAcross : kAbreastAcross / 2, N>(p, table, first, last, vector, sums,
                                                                               factors);
  rows_across<C, 1, N>(p, table, row, last, vector, sums, factors);
}

template <typename C>
static void thin_across(const CodesProduct& p, int64_t item, float* scratch) {
  const Codes& w = p.w;
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, w.rows);
  const typename C::Table table(w);
  float* const mine = p.packed + item * p.count * w.inner;
  for (int64_t k = 0; k < p.count * w.inner; ++k) mine[k] = 0;
  if (w.group % C::kChunk == 0) {
    int64_t n = 0;
    for (; n + kTogetherAcross <= p.count; n += kTogetherAcross)
      groups_across<C, kTogetherAcross>(p, table, first, last, n, mine + n * w.inner, scratch);
    for (; n < p.count; ++n) groups_across<C, 1>(p, table, first, last, n, mine + n * w.inner, scratch);
    return;
  }
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

// The vectors, arranged.
static void arrange_thin(const CodesProduct& p, int64_t n) {
  const int64_t inner = p.w.inner, whole = inner - inner % Four::kChunk;
  const float* const from = p.x + n * inner;
  float* const to = p.packed + n * inner;
  int64_t k = 0;
  for (; k < whole; k += Four::kChunk) {
    const Vec a = load(from + k), b = load(from + k + kWidth);
    store(to + k, pick(a, b, 2 * lanes()));
    store(to + k + kWidth, pick(a, b, 2 * lanes() + 1));
  }
  for (; k < inner; ++k) to[k] = from[k];
}

// One vector's sums of all items, in the order of columns.
template <typename C>
static void finish_thin(const CodesProduct& p, int64_t n) {
  const int64_t inner = p.w.inner, whole = inner - inner % C::kChunk, items = parts(p.w.rows, thin_share(p));
  const float* const from = p.packed + n * inner;
  float* const to = p.out + n * inner;
  const int64_t step = p.count * inner;
  int64_t k = 0;
  for (; k < whole; k += C::kChunk) {
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
  for (; k < inner; ++k) {
    float found = 0;
    for (int64_t item = 0; item < items; ++item) found += from[item * step + k];
    to[k] = found;
  }
}

}  // namespace CAPIBARA_ISA
