// What forward and backward pass share: tiles of scores, how rows get into and out of scratch, what is hidden.
#pragma once

#include "attention.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Attention;
using capibara::Steps;

constexpr int64_t kKeys = 128;                          // keys of a tile
constexpr int64_t kColumns = kVectors * kWidth;         // keys computed at a time
constexpr int64_t kQueryRows = 48 / kRows * kRows;      // query rows of a tile
// Floats from one row of a tile to the next. Not a power of two: a column's lines lie in different sets of the cache.
constexpr int64_t kPitch = kKeys + 16;
constexpr float kLog2E = 1.44269504f;
constexpr float kHidden = -__builtin_inff();

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static inline int64_t padded(int64_t n) { return up_to(n, kWidth); }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void fill_zero(float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

// Rows of one head, of either type.
struct Rows_ {
  const void* at;
  int64_t step;
  bool narrow;
};

static Rows_ rows_of(const Attention& a, const void* array, const Steps& s, int64_t b, int64_t h, int64_t first) {
  const int64_t offset = b * s.batch + h * s.head + first * s.position;
  if (a.narrow) return {static_cast<const uint16_t*>(array) + offset, s.position, true};
  return {static_cast<const float*>(array) + offset, s.position, false};
}

// In the layout [batch, length, heads, dim] a head's rows lie apart, where the processor's own prefetching loses
// the trail: every row would be a wait for memory.
template <typename T>
static inline void ask_for_row(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}
constexpr int64_t kAhead = 12;  // rows

template <typename T>
static void pack_from(const T* from, int64_t step, int64_t count, int64_t dim, float factor, float* to) {
  const int64_t wide = padded(dim);
  for (int64_t i = 0; i < count; ++i, from += step, to += wide) {
    if (i + kAhead < count) ask_for_row(from + kAhead * step, dim);
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(to + d, load(from + d) * splat(factor));
    for (; d < dim; ++d) to[d] = number(from[d]) * factor;
    for (; d < wide; ++d) to[d] = 0;
  }
}

// rows [count, dim] -> to [total, padded(dim)], times `factor`; the padding and the rows past count are zero.
static void pack(const Rows_& from, int64_t count, int64_t total, int64_t dim, float factor, float* to) {
  if (from.narrow)
    pack_from(static_cast<const uint16_t*>(from.at), from.step, count, dim, factor, to);
  else
    pack_from(static_cast<const float*>(from.at), from.step, count, dim, factor, to);
  fill_zero(to + count * padded(dim), (total - count) * padded(dim));
}

template <typename T>
static void pack_transposed_from(const T* from, int64_t step, int64_t count, int64_t dim, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth, from += kWidth * step) {
    for (int64_t r = 0; r < kWidth; ++r)
      if (i + kWidth + r < count) ask_for_row(from + (kWidth + r) * step, dim);
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
      Vec block[kWidth];
      for (int64_t r = 0; r < kWidth; ++r) block[r] = load(from + r * step + d);
      transpose(block);
      for (int64_t r = 0; r < kWidth; ++r) store(to + (d + r) * kPitch + i, block[r]);
    }
    for (; d < dim; ++d)
      for (int64_t r = 0; r < kWidth; ++r) to[d * kPitch + i + r] = number(from[r * step + d]);
  }
  for (; i < count; ++i, from += step)
    for (int64_t d = 0; d < dim; ++d) to[d * kPitch + i] = number(from[d]);
}

// rows [count, dim] -> to [dim, kPitch]; the keys from count to kKeys are zero.
static void pack_transposed(const Rows_& from, int64_t count, int64_t dim, float* to) {
  if (from.narrow)
    pack_transposed_from(static_cast<const uint16_t*>(from.at), from.step, count, dim, to);
  else
    pack_transposed_from(static_cast<const float*>(from.at), from.step, count, dim, to);
  if (count < kKeys)
    for (int64_t d = 0; d < dim; ++d) fill_zero(to + d * kPitch + count, kKeys - count);
}

template <typename T>
static void unpack_to(const float* from, int64_t count, int64_t dim, float factor, T* to, int64_t step) {
  const int64_t wide = padded(dim);
  for (int64_t i = 0; i < count; ++i, from += wide, to += step) {
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(to + d, load(from + d) * splat(factor));
    for (; d < dim; ++d) put(to + d, from[d] * factor);
  }
}

// The other way: rows of scratch, times `factor`, to an array.
static void unpack(const float* from, int64_t count, int64_t dim, float factor, const Rows_& to) {
  void* at = const_cast<void*>(to.at);
  if (to.narrow)
    unpack_to(from, count, dim, factor, static_cast<uint16_t*>(at), to.step);
  else
    unpack_to(from, count, dim, factor, static_cast<float*>(at), to.step);
}

// Which columns of the key block [key, key + count) the rows [row, row + rows) see.
struct Span {
  int64_t first, last;  // that some row sees, from the block's start, in whole steps of kColumns; none: last <= first
  int64_t from, to;     // that every row sees
  int64_t last_seen;    // as `last`, exactly
};

static inline Span visible(const Attention& a, int64_t row, int64_t rows, int64_t key, int64_t count) {
  const int64_t first = most(row - a.left - key, 0), last = least(row + rows + a.right - key, count);
  if (last <= first) return {0, 0, 0, 0, 0};
  return {first / kColumns * kColumns, up_to(last, kColumns), most(row + rows - 1 - a.left - key, 0),
          least(row + 1 + a.right - key, count), last};
}

// The columns that one row sees.
static inline int64_t row_first(const Attention& a, int64_t row, int64_t key) { return most(row - a.left - key, 0); }
static inline int64_t row_last(const Attention& a, int64_t row, int64_t key, int64_t count) {
  return least(row + a.right + 1 - key, count);
}

// x where column + lane lies in [from, to), else 0.
static inline Vec only_within(Vec x, int64_t column, int64_t from, int64_t to) {
  const IntVec at = lanes() + int32_t(column);
  return select((at >= int32_t(from)) & (at < int32_t(to)), x, Vec{});
}

static inline bool plain(const Attention& a) {
  return a.softcap == 0 && a.bias.at == nullptr && a.query_ids == nullptr;
}

static inline int64_t bias_offset(const Attention& a, int64_t b, int64_t h) {
  return b / a.bias.inner * a.bias.outer + b % a.bias.inner * a.bias.batch + h * a.bias.head;
}

// Bends scores, adds the bias and hides what may not be seen: columns [first, last) of a tile of raw scores (times
// log2 e), for the rows [row, row + rows) and the keys [key, key + count). `slope`, if given, gets the derivative of
// the bend, in a tile of the same form.
static void finish_scores(const Attention& a, int64_t b, int64_t h, int64_t row, int64_t rows, int64_t key,
                          int64_t count, int64_t first, int64_t last, float* scores, float* slope) {
  const float* bias = a.bias.at == nullptr ? nullptr : a.bias.at + bias_offset(a, b, h);
  int32_t ids[kKeys] = {};
  if (a.query_ids != nullptr)
    for (int64_t c = 0; c < count; ++c) ids[c] = a.key_ids[b * a.kv_len + key + c];
  for (int64_t r = 0; r < rows; ++r) {
    float* line = scores + r * kPitch;
    if (a.softcap != 0) {
      const Vec cap = splat(a.softcap * kLog2E), inverse = splat(1.0f / (a.softcap * kLog2E));
      for (int64_t c = first; c < last; c += kWidth) {
        const Vec t = tanh(load(line + c) * inverse);
        store(line + c, t * cap);
        if (slope != nullptr) store(slope + r * kPitch + c, 1.0f - t * t);
      }
    }
    const int64_t from = least(most(row_first(a, row + r, key), first), last);
    const int64_t to = most(least(row_last(a, row + r, key, count), last), from);
    if (bias != nullptr) {
      const float* added = bias + (row + r) * a.bias.row + key * a.bias.key;
      int64_t c = from;
      if (a.bias.key == 0)
        for (; c < to; ++c) line[c] += added[0] * kLog2E;
      else
        for (; c < to; ++c) line[c] += added[c] * kLog2E;
    }
    if (a.query_ids != nullptr) {
      const int32_t own = a.query_ids[b * a.q_len + row + r];
      for (int64_t c = from; c < to; ++c) line[c] = ids[c] == own ? line[c] : kHidden;
    }
    for (int64_t c = first; c < from; ++c) line[c] = kHidden;
    for (int64_t c = to; c < last; ++c) line[c] = kHidden;
  }
}

}  // namespace CAPIBARA_ISA
