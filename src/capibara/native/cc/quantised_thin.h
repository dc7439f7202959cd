// Few vectors: what takes the time is reading the codes, and making numbers of them. Each code is read once for as many
// vectors as registers hold the sums of, several rows at a time so that sums do not wait for one another.
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

// Across (quantised_across.h):
constexpr int kTogetherAcross = kWidth >= 16 ? 4 : 2;
constexpr int kAbreastAcross = 8;      // rows for one vector
constexpr int kAbreastHalved = 4;      // the same, of columns that are halved
constexpr int kSeveralAbreast = 4;     // for several vectors

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

// What halved columns are multiplied by: a group's scale, or those of two, one in each half.
template <bool kTwo, bool kCoded>
static inline __attribute__((always_inline)) Vec halved_scale(const KnownScales<kCoded>& scales, int64_t i) {
  Vec one = splat(scales[i]);
  if constexpr (!kTwo) return one;
  Vec other = splat(scales[i + 1]);
#if defined(__AVX2__)
  // GCC 12 would put scales that lie side by side together in memory, and wait for them there.
  asm("" : "+x"(one));
  asm("" : "+x"(other));
#endif
  return pick(one, other, lanes() + (lanes() & (kWidth / 2)) * 2);
}

// Whether whole blocks of columns are read halved.
template <typename C>
static inline bool is_halved(const Codes& w) {
  if constexpr (C::kHalved == 0)
    return false;
  else
    return w.group == C::kHalved / 2 || w.group % C::kHalved == 0;
}

// kHalved columns of R rows, times N vectors. What belongs to a group begins with its first columns, or goes on.
template <typename C, bool kBegins, int R, int N>
static inline __attribute__((always_inline)) void add_halved(const uint8_t* codes, int64_t width,
                                                             const typename C::Table& table, const float* x,
                                                             int64_t inner, const Vec (&scale)[R], Vec (&part)[R][2],
                                                             Vec (&total)[R][N]) {
  constexpr int kVecs = C::kHalved / kWidth;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      Vec values[kVecs / 2];
      C::read_halved(codes + r * width, odd, table, values);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs / 2; ++v) {
        const float* const by = x + (odd * (kVecs / 2) + v) * kWidth;
        if (N == 1) {
          // Two sums of a row, for each waits for what was added to it before.
          part[r][odd] = kBegins && v == 0 ? values[v] * load(by) : part[r][odd] + values[v] * load(by);
        } else {
          const Vec value = values[v] * scale[r];
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) total[r][n] += value * load(by + n * inner);
        }
      }
    }
  }
}

// R rows times N vectors, columns that are halved: of two groups at once where they are as long as a half. The column
// after the last of them.
template <typename C, bool kCoded, bool kTwo, int R, int N>
static inline __attribute__((always_inline)) int64_t halved_groups(const Codes& w, const typename C::Table& table,
                                                                   const KnownScales<kCoded>& scales,
                                                                   const uint8_t* codes, const float* x,
                                                                   Vec (&total)[R][N]) {
  const int64_t whole = w.inner - w.inner % C::kHalved;
  int64_t k = 0;
  for (int64_t g = 0; k < whole; g += kTwo ? 2 : 1) {
    const int64_t stop = kTwo ? k + C::kHalved : least(k + w.group, whole);
    Vec scale[R], part[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) scale[r] = halved_scale<kTwo>(scales, r * w.groups + g);
    bring_next<C, R>(codes, w.width, k);
    add_halved<C, true, R, N>(codes + C::byte(k), w.width, table, x + k, w.inner, scale, part, total);
    for (k += C::kHalved; k < stop; k += C::kHalved) {
      bring_next<C, R>(codes, w.width, k);
      add_halved<C, false, R, N>(codes + C::byte(k), w.width, table, x + k, w.inner, scale, part, total);
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
static void thin_rows(const CodesProduct& p, int64_t first, int64_t last, const float* plain, const float* x,
                      float* out, float* scratch) {
  const Codes& w = p.w;
  const int64_t inner = w.inner;
  const typename C::Table table(w);
  int64_t row = first;
  if (w.group % C::kChunk == 0) {
    if (w.scales == nullptr) {
      for (; row + kAbreast <= last; row += kAbreast)
        whole_groups<C, true, kAbreast, N>(p, table, row, plain, x, out + row);
      for (; row < last; ++row) whole_groups<C, true, 1, N>(p, table, row, plain, x, out + row);
    } else {
      for (; row + kAbreast <= last; row += kAbreast)
        whole_groups<C, false, kAbreast, N>(p, table, row, plain, x, out + row);
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

static bool fetch_thin(const CodesProduct& p, int64_t item, int64_t part) {
  const int64_t share = thin_share(p), first = item * share, last = least(first + share, p.w.rows);
  const uint8_t* const codes = p.w.codes + first * p.w.width;
  const int64_t bytes = (last - first) * p.w.width;
  for (int64_t j = part * kPart; j < least((part + 1) * kPart, bytes); j += 64) __builtin_prefetch(codes + j, 0, 2);
  return part + 1 < least(parts(bytes, kPart), kMostParts);
}

}  // namespace CAPIBARA_ISA
