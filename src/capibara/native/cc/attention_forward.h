// The forward pass of softmax attention.
#pragma once

#include "attention_tile.h"

namespace CAPIBARA_ISA {

constexpr float kFloor = -1e29f;  // a row whose best score lies below sees no key
// Where no score can lie further from 0 than this, weights are taken relative to 0: no maximum has to be found first.
constexpr float kNear = 60.0f;

// Most query rows of a forward item, whose queries and results stay in the second-level cache.
static int64_t most_rows(const Attention& a) {
  return (padded(a.dim) + padded(a.value_dim) <= 128 ? 1024 : 512) / kQueryRows * kQueryRows;
}

// Query rows of a forward item: as many as may be, since every item packs its keys anew; but some items for every
// thread.
static int64_t chunk_rows(const Attention& a) {
  const int64_t others = most(a.batch * a.heads, 1), most_chunks = most(ceil_div(a.q_len, 2 * kQueryRows), 1);
  const int64_t wanted = least(ceil_div(4 * a.threads, others), most_chunks);
  return up_to(ceil_div(a.q_len, most(ceil_div(a.q_len, most_rows(a)), wanted)), kQueryRows);
}

static int64_t forward_items(const Attention& a) {
  return a.q_len == 0 ? 0 : a.batch * a.heads * ceil_div(a.q_len, chunk_rows(a));
}

static int64_t forward_scratch(const Attention& a) {
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim);
  return most_rows(a) * (dim + wide + 1 + kWidth) + kPitch * a.dim + kKeys * wide + kQueryRows * kPitch + 64;
}

// What one thread keeps while it works on an item.
struct Forward {
  int64_t dim, wide;  // padded
  float *query, *out, *total, *best, *keys, *packed_values, *scores;
  const float* values;  // of a block: packed, or where they lie
};

// The largest square of a row's length; NaN where one is not finite.
static float longest_row(const float* rows, int64_t count, int64_t wide) {
  float found = 0, zero = 0;
  for (int64_t i = 0; i < count; ++i, rows += wide) {
    Vec squares{};
    for (int64_t d = 0; d < wide; d += kWidth) squares += load(rows + d) * load(rows + d);
    const float length = sum(squares);
    found = length > found ? length : found;
    zero += length * 0.0f;
  }
  return found + zero;
}

static float longest_column(const float* columns, int64_t depth) {
  Vec longest{}, zero{};
  for (int64_t j = 0; j < kKeys; j += 2 * kWidth) {
    Vec one{}, other{};
    for (int64_t d = 0; d < depth; ++d) {
      const Vec x = load(columns + d * kPitch + j), y = load(columns + d * kPitch + j + kWidth);
      one += x * x, other += y * y;
    }
    longest = max(longest, max(one, other));
    zero += (one + other) * 0.0f;
  }
  return max_across(longest) + sum(zero);
}

static void rescale(const Forward& f, int64_t row, float now) {
  const Vec shrink = exp2(splat(f.best[row] - now));
  float* total = f.total + row * kWidth;
  float* out = f.out + row * f.wide;
  store(total, load(total) * shrink);
  for (int64_t d = 0; d < f.wide; d += kWidth) store(out + d, load(out + d) * shrink);
  f.best[row] = now;
}

template <int C, bool kMasked>
static inline void near_tile(const Attention& a, const Forward& f, int64_t first, int64_t row, int64_t strip,
                             int64_t key, int64_t count, int64_t j) {
  float* total = f.total + (row + strip) * kWidth;
  float* weights = f.scores + strip * kPitch + j;
  const float* best = f.best + row + strip;
  const int64_t at = first + row + strip;
  fused<C>(
      a.dim, f.query + (row + strip) * f.dim, f.dim, f.keys + j, kPitch, [&](int r) { return splat(-best[r]); },
      [&](int r, int c, Vec x) {
        Vec p = exp2(x);
        if (kMasked) p = only_within(p, j + c, row_first(a, at + r, key), row_last(a, at + r, key, count));
        store(weights + r * kPitch + c, p);
        store(total + r * kWidth, load(total + r * kWidth) + p);
      });
}

// The weights of one tile, where no score lies further from 0 than kNear.
static void near_weights(const Attention& a, const Forward& f, int64_t first, int64_t row, int64_t rows, int64_t key,
                         int64_t count, const Span& block) {
  for (int64_t r = row; r < row + rows; ++r) {
    if (f.best[r] == kFloor) f.best[r] = 0;  // nothing seen yet
    if (f.best[r] < 0) rescale(f, r, 0);
  }
  for (int64_t j = block.first; j < block.last; j += kColumns)
    for (int64_t strip = 0; strip < rows; strip += kRows) {
      const Span s = visible(a, first + row + strip, kRows, key, count);
      if (j < s.first || j >= s.last) continue;
      if (j >= s.from && j + kColumns <= s.to) {
        near_tile<kVectors, false>(a, f, first, row, strip, key, count, j);
      } else if (s.last_seen - j <= kWidth) {
        near_tile<1, true>(a, f, first, row, strip, key, count, j);
      } else {
        near_tile<kVectors, true>(a, f, first, row, strip, key, count, j);
      }
    }
}

// The same for any scores: the maximum first.
static void any_weights(const Attention& a, const Forward& f, int64_t b, int64_t h, int64_t first, int64_t row,
                        int64_t rows, int64_t key, int64_t count, const Span& s) {
  const int64_t width = s.last - s.first;
  product(rows, width, a.dim, f.query + row * f.dim, f.dim, 1, f.keys + s.first, kPitch, f.scores + s.first, kPitch,
          false);
  finish_scores(a, b, h, first + row, rows, key, count, s.first, s.last, f.scores, nullptr);
  for (int64_t r = row; r < row + rows; ++r) {
    float* line = f.scores + (r - row) * kPitch + s.first;
    Vec top = load(line);
    for (int64_t c = kWidth; c < width; c += kWidth) top = max(top, load(line + c));
    const float high = max_across(top);
    if (high > f.best[r]) rescale(f, r, high);
    const Vec best = splat(f.best[r]);
    Vec added{};
    for (int64_t c = 0; c < width; c += kWidth) {
      const Vec p = exp2(load(line + c) - best);
      store(line + c, p);
      added += p;
    }
    store(f.total + r * kWidth, load(f.total + r * kWidth) + added);
  }
}

// Adds the values, times their weights, to the rows of a tile: for each strip of rows only the keys that it sees.
// A function of its own: in the one below, the tile's registers would not be enough (a third slower with AVX2).
static __attribute__((noinline)) void weigh(const Attention& a, const Forward& f, int64_t first, int64_t row,
                                            int64_t rows, int64_t key, int64_t count) {
  for (int64_t d = 0; d < f.wide; d += kColumns)
    for (int64_t strip = 0; strip < rows; strip += kRows) {
      const int64_t own = least(kRows, rows - strip), at = first + row + strip;
      const int64_t from = row_first(a, at, key), to = row_last(a, at + own - 1, key, count);
      if (to > from)
        product(own, least(kColumns, f.wide - d), to - from, f.scores + strip * kPitch + from, kPitch, 1,
                f.values + from * f.wide + d, f.wide, f.out + (row + strip) * f.wide + d, f.wide, true);
    }
}

static void forward(const Attention& a, int64_t item, float* scratch) {
  // The last rows first: under a causal mask they are the most work, and what starts late should be short.
  const int64_t size = chunk_rows(a), chunks = ceil_div(a.q_len, size);
  const int64_t chunk = chunks - 1 - item / (a.batch * a.heads);
  const int64_t b = item % (a.batch * a.heads) / a.heads, h = item % a.heads;
  const int64_t kv = h / (a.heads / a.kv_heads);
  const int64_t first = chunk * size, count = least(size, a.q_len - first), all = up_to(count, kRows);
  Forward f;
  f.dim = padded(a.dim), f.wide = padded(a.value_dim);
  f.query = scratch;
  const int64_t room = most_rows(a);
  f.out = f.query + room * f.dim;
  f.total = f.out + room * f.wide;
  f.best = f.total + room * kWidth;
  f.keys = f.best + room;
  f.packed_values = f.keys + kPitch * a.dim;
  f.scores = f.packed_values + kKeys * f.wide;

  pack(rows_of(a, a.query, a.query_steps, b, h, first), count, all, a.dim, a.scale * kLog2E, f.query);
  fill_zero(f.out, all * f.wide);
  fill_zero(f.total, all * kWidth);
  for (int64_t i = 0; i < all; ++i) f.best[i] = kFloor;

  const bool is_plain = plain(a);
  const float query_length = is_plain ? longest_row(f.query, count, f.dim) : 0;
  const int64_t start = most(first - a.left, 0) / kKeys * kKeys;
  const int64_t stop = least(first + count + a.right, a.kv_len);
  for (int64_t j = start; j < stop; j += kKeys) {
    const int64_t n = least(kKeys, a.kv_len - j);
    pack_transposed(rows_of(a, a.key, a.key_steps, b, kv, j), n, a.dim, f.keys);
    const Rows_ values = rows_of(a, a.value, a.value_steps, b, kv, j);
    // Rows that lie as they would be packed are read where they are.
    const bool lie_packed = !a.narrow && a.value_dim == f.wide && values.step == f.wide;
    f.values = lie_packed ? static_cast<const float*>(values.at) : f.packed_values;
    if (!lie_packed) pack(values, n, n, a.value_dim, 1.0f, f.packed_values);
    const bool is_near = is_plain && query_length * longest_column(f.keys, a.dim) <= kNear * kNear;
    for (int64_t i = 0; i < count; i += kQueryRows) {
      const int64_t rows = least(kQueryRows, count - i);
      const Span s = visible(a, first + i, rows, j, n);
      if (s.last <= s.first) continue;
      if (is_near)
        near_weights(a, f, first, i, up_to(rows, kRows), j, n, s);
      else
        any_weights(a, f, b, h, first, i, rows, j, n, s);
      weigh(a, f, first, i, rows, j, n);
    }
  }

  float* stat = a.stat + (b * a.heads + h) * a.q_len + first;
  for (int64_t i = 0; i < count; ++i) {
    // A row that sees no key gives zeros here, and weights of 2^-inf in the backward pass.
    const float total = sum(load(f.total + i * kWidth));
    const bool none = total == 0;
    unpack(f.out + i * f.wide, 1, a.value_dim, none ? 0.0f : 1.0f / total,
           rows_of(a, a.out, a.out_steps, b, h, first + i));
    stat[i] = none ? __builtin_inff() : f.best[i] + __builtin_log2f(total);
  }
}

}  // namespace CAPIBARA_ISA
