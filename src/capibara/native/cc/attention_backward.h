// The backward pass of softmax attention.
#pragma once

#include "attention_tile.h"

namespace CAPIBARA_ISA {

static int64_t backward_items(const Attention& a) { return a.batch * a.kv_heads; }

static int64_t backward_scratch(const Attention& a) {
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim), rows = up_to(a.q_len, kRows);
  return rows * (2 * dim + wide + 2) + (a.kv_len + kKeys) * (dim + wide) + kPitch * (a.dim + a.value_dim) +
         kKeys * dim + 3 * kQueryRows * kPitch + 64;
}

// What one thread keeps while it works on an item: a head's arrays, and tiles.
struct Backward {
  int64_t dim, wide;                          // padded
  float *query, *query_grad, *out_grad;       // [q_len, …]
  float *stat, *delta;                        // negative
  float *key_grad, *value_grad;               // [kv_len, …]
  float *keys, *values, *key_rows;            // of a tile: [dim, kPitch], [value_dim, kPitch], [kKeys, dim]
  float *weights, *grads, *slopes;            // tiles
};

// sum_d grad[i, d] out[i, d] of each row, negative.
template <typename T>
static void negative_delta(const float* grad, int64_t wide, const T* out, int64_t step, int64_t count, int64_t dim,
                           float* delta) {
  for (int64_t i = 0; i < count; ++i, grad += wide, out += step) {
    if (i + kAhead < count) ask_for_row(out + kAhead * step, dim);
    Vec total{};
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) total += load(grad + d) * load(out + d);
    float rest = sum(total);
    for (; d < dim; ++d) rest += grad[d] * number(out[d]);
    delta[i] = -rest;
  }
}

// The rows' part of the state, of one head.
static void take_head(const Attention& a, const Backward& t, int64_t b, int64_t h) {
  const int64_t all = up_to(a.q_len, kRows);
  pack(rows_of(a, a.query, a.query_steps, b, h, 0), a.q_len, all, a.dim, a.scale * kLog2E, t.query);
  pack(rows_of(a, a.out_grad, a.out_steps, b, h, 0), a.q_len, all, a.value_dim, 1.0f, t.out_grad);
  const Rows_ out = rows_of(a, a.out, a.out_steps, b, h, 0);
  if (a.narrow)
    negative_delta(t.out_grad, t.wide, static_cast<const uint16_t*>(out.at), out.step, a.q_len, a.value_dim, t.delta);
  else
    negative_delta(t.out_grad, t.wide, static_cast<const float*>(out.at), out.step, a.q_len, a.value_dim, t.delta);
  const float* stat = a.stat + (b * a.heads + h) * a.q_len;
  for (int64_t i = 0; i < a.q_len; ++i) t.stat[i] = -stat[i];
  for (int64_t i = a.q_len; i < all; ++i) t.stat[i] = kHidden, t.delta[i] = 0;
}

template <bool kMasked>
static inline void plain_tile(const Attention& a, const Backward& t, int64_t row, int64_t strip, int64_t key,
                              int64_t count, int64_t j) {
  const int64_t at = row + strip;
  float* weights = t.weights + strip * kPitch + j;
  float* grads = t.grads + strip * kPitch + j;
  fused<kVectors>(
      a.dim, t.query + at * t.dim, t.dim, t.keys + j, kPitch, [&](int r) { return splat(t.stat[at + r]); },
      [&](int r, int c, Vec x) {
        Vec p = exp2(x);
        if (kMasked) p = only_within(p, j + c, row_first(a, at + r, key), row_last(a, at + r, key, count));
        store(weights + r * kPitch + c, p);
      });
  fused<kVectors>(
      a.value_dim, t.out_grad + at * t.wide, t.wide, t.values + j, kPitch, [&](int r) { return splat(t.delta[at + r]); },
      [&](int r, int c, Vec x) { store(grads + r * kPitch + c, x * load(weights + r * kPitch + c)); });
}

// Weights and the gradients of the scores of one tile: the fast way, strip by strip.
static void plain_scores(const Attention& a, const Backward& t, int64_t row, int64_t rows, int64_t key, int64_t count,
                         const Span& block) {
  for (int64_t j = block.first; j < block.last; j += kColumns)
    for (int64_t strip = 0; strip < rows; strip += kRows) {
      const Span s = visible(a, row + strip, kRows, key, count);
      if (j < s.first || j >= s.last) {
        for (int64_t r = strip; r < strip + kRows; ++r) {
          fill_zero(t.weights + r * kPitch + j, kColumns);
          fill_zero(t.grads + r * kPitch + j, kColumns);
        }
      } else if (j >= s.from && j + kColumns <= s.to) {
        plain_tile<false>(a, t, row, strip, key, count, j);
      } else {
        plain_tile<true>(a, t, row, strip, key, count, j);
      }
    }
}

// The same with a bend, a bias or segments. `grads` are of the scores after the bend; their slopes are kept.
static void any_scores(const Attention& a, const Backward& t, int64_t b, int64_t h, int64_t row, int64_t rows,
                       int64_t key, int64_t count, const Span& s) {
  const int64_t width = s.last - s.first;
  product(rows, width, a.dim, t.query + row * t.dim, t.dim, 1, t.keys + s.first, kPitch, t.weights + s.first, kPitch,
          false);
  finish_scores(a, b, h, row, rows, key, count, s.first, s.last, t.weights, t.slopes);
  product(rows, width, a.value_dim, t.out_grad + row * t.wide, t.wide, 1, t.values + s.first, kPitch,
          t.grads + s.first, kPitch, false);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec stat = splat(t.stat[row + r]), delta = splat(t.delta[row + r]);
    for (int64_t c = r * kPitch + s.first; c < r * kPitch + s.last; c += kWidth) {
      const Vec p = exp2(load(t.weights + c) + stat);
      store(t.weights + c, p);
      store(t.grads + c, p * (load(t.grads + c) + delta));
    }
  }
}

static void times_slopes(const Backward& t, int64_t rows, const Span& s) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r * kPitch + s.first; c < r * kPitch + s.last; c += kWidth)
      store(t.grads + c, load(t.grads + c) * load(t.slopes + c));
}

// What a tile adds to the three gradients. Where rows see different keys, each strip of keys takes only the rows that
// see some of them, and each strip of rows its keys.
static void add_products(const Attention& a, const Backward& t, int64_t row, int64_t rows, int64_t key, int64_t count,
                         const Span& block) {
  const float *query = t.query + row * t.dim, *out_grad = t.out_grad + row * t.wide;
  float *key_grad = t.key_grad + key * t.dim, *value_grad = t.value_grad + key * t.wide;
  if (block.from <= block.first && block.to >= block.last) {
    const int64_t j = block.first, width = block.last - j;
    product(width, t.wide, rows, t.weights + j, 1, kPitch, out_grad, t.wide, value_grad + j * t.wide, t.wide, true);
    product(width, t.dim, rows, t.grads + j, 1, kPitch, query, t.dim, key_grad + j * t.dim, t.dim, true);
    product(rows, t.dim, width, t.grads + j, kPitch, 1, t.key_rows + j * t.dim, t.dim, t.query_grad + row * t.dim,
            t.dim, true);
    return;
  }
  constexpr int64_t kStrip = 2 * kRows;
  const int64_t last = least(block.last, count);
  for (int64_t j = block.first; j < last; j += kStrip) {
    const int64_t width = least(kStrip, last - j);
    const int64_t from = most(key + j - a.right - row, 0), to = least(key + j + width + a.left - row, rows);
    if (to <= from) continue;
    product(width, t.wide, to - from, t.weights + from * kPitch + j, 1, kPitch, out_grad + from * t.wide, t.wide,
            value_grad + j * t.wide, t.wide, true);
    product(width, t.dim, to - from, t.grads + from * kPitch + j, 1, kPitch, query + from * t.dim, t.dim,
            key_grad + j * t.dim, t.dim, true);
  }
  for (int64_t strip = 0; strip < rows; strip += kStrip) {
    const int64_t n = least(kStrip, rows - strip);
    const int64_t from = row_first(a, row + strip, key), to = row_last(a, row + strip + n - 1, key, count);
    if (to <= from) continue;
    product(n, t.dim, to - from, t.grads + strip * kPitch + from, kPitch, 1, t.key_rows + from * t.dim, t.dim,
            t.query_grad + (row + strip) * t.dim, t.dim, true);
  }
}

static void take_keys(const Attention& a, const Backward& t, int64_t b, int64_t kv, int64_t key, int64_t count) {
  pack_transposed(rows_of(a, a.key, a.key_steps, b, kv, key), count, a.dim, t.keys);
  pack_transposed(rows_of(a, a.value, a.value_steps, b, kv, key), count, a.value_dim, t.values);
}

// Cuts the scratch of a backward item.
static Backward cut(const Attention& a, float* scratch) {
  const int64_t all = up_to(a.q_len, kRows);
  Backward t;
  t.dim = padded(a.dim), t.wide = padded(a.value_dim);
  t.query = scratch;
  t.query_grad = t.query + all * t.dim;
  t.out_grad = t.query_grad + all * t.dim;
  t.key_grad = t.out_grad + all * t.wide;
  t.value_grad = t.key_grad + (a.kv_len + kKeys) * t.dim;
  t.keys = t.value_grad + (a.kv_len + kKeys) * t.wide;
  t.values = t.keys + kPitch * a.dim;
  t.key_rows = t.values + kPitch * a.value_dim;
  t.weights = t.key_rows + kKeys * t.dim;
  t.grads = t.weights + kQueryRows * kPitch;
  t.slopes = t.grads + kQueryRows * kPitch;
  t.stat = t.slopes + kQueryRows * kPitch;
  t.delta = t.stat + all;
  return t;
}

static void backward(const Attention& a, int64_t item, float* scratch) {
  const int64_t b = item / a.kv_heads, kv = item % a.kv_heads, group = a.heads / a.kv_heads;
  const Backward t = cut(a, scratch);
  const bool is_plain = plain(a);
  fill_zero(t.key_grad, (a.kv_len + kKeys) * t.dim);
  fill_zero(t.value_grad, (a.kv_len + kKeys) * t.wide);
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    take_head(a, t, b, h);
    fill_zero(t.query_grad, a.q_len * t.dim);
    for (int64_t j = 0; j < a.kv_len; j += kKeys) {
      const int64_t n = least(kKeys, a.kv_len - j);
      // Rows that see something of this block.
      const int64_t first = most(j - a.right, 0) / kRows * kRows, stop = least(j + n + a.left, a.q_len);
      if (first >= stop) continue;
      take_keys(a, t, b, kv, j, n);
      pack(rows_of(a, a.key, a.key_steps, b, kv, j), n, kKeys, a.dim, 1.0f, t.key_rows);
      for (int64_t i = first; i < stop; i += kQueryRows) {
        const int64_t rows = least(kQueryRows, a.q_len - i);
        const Span s = visible(a, i, rows, j, n);
        if (s.last <= s.first) continue;
        if (is_plain) {
          plain_scores(a, t, i, up_to(rows, kRows), j, n, s);
        } else {
          any_scores(a, t, b, h, i, rows, j, n, s);
          if (a.softcap != 0) times_slopes(t, rows, s);
        }
        add_products(a, t, i, rows, j, n, s);
      }
    }
    unpack(t.query_grad, a.q_len, a.dim, a.scale, rows_of(a, a.query_grad, a.query_steps, b, h, 0));
  }
  // The packed query carries scale * log2(e); only the scale belongs to the key's gradient.
  unpack(t.key_grad, a.kv_len, a.dim, 1.0f / kLog2E, rows_of(a, a.key_grad, a.key_steps, b, kv, 0));
  unpack(t.value_grad, a.kv_len, a.value_dim, 1.0f, rows_of(a, a.value_grad, a.value_steps, b, kv, 0));
}

// The bias' gradient is a pass of its own: its items are those of the bias, each of which sums over the heads and the
// batch elements that share it. A program that does not ask for it does not run it.
static int64_t bias_blocks(const Attention& a) { return a.bias.key == 0 ? 1 : ceil_div(a.kv_len, kKeys); }

static int64_t bias_items(const Attention& a) {
  const int64_t inner = a.bias.batch == 0 ? 1 : a.bias.inner, heads = a.bias.head == 0 ? 1 : a.heads;
  return a.q_len == 0 ? 0 : a.batch / a.bias.inner * inner * heads * bias_blocks(a);
}

static void bias(const Attention& a, int64_t item, float* scratch) {
  const int64_t blocks = bias_blocks(a), heads = a.bias.head == 0 ? 1 : a.heads;
  const int64_t inner = a.bias.batch == 0 ? 1 : a.bias.inner;
  const int64_t block = item % blocks, head = item / blocks % heads, slot = item / blocks / heads;
  const int64_t outer = slot / inner, begin = outer * a.bias.inner + (a.bias.batch == 0 ? 0 : slot % inner);
  const int64_t end = a.bias.batch == 0 ? begin + a.bias.inner : begin + 1;
  const int64_t from = blocks == 1 ? 0 : block * kKeys, to = blocks == 1 ? a.kv_len : least(from + kKeys, a.kv_len);
  const int64_t group = a.heads / a.kv_heads;
  const Backward t = cut(a, scratch);
  float* grad = a.bias_grad + bias_offset(a, begin, head);
  for (int64_t i = 0; i < (a.bias.row == 0 ? 1 : a.q_len); ++i)
    if (a.bias.key == 0)
      grad[i * a.bias.row] = 0;
    else
      fill_zero(grad + i * a.bias.row + from, to - from);
  for (int64_t b = begin; b < end; ++b)
    for (int64_t h = head; h < (a.bias.head == 0 ? a.heads : head + 1); ++h) {
      take_head(a, t, b, h);
      for (int64_t j = from; j < to; j += kKeys) {
        const int64_t n = least(kKeys, a.kv_len - j);
        take_keys(a, t, b, h / group, j, n);
        for (int64_t i = 0; i < a.q_len; i += kQueryRows) {
          const int64_t rows = least(kQueryRows, a.q_len - i);
          const Span s = visible(a, i, rows, j, n);
          if (s.last <= s.first) continue;
          any_scores(a, t, b, h, i, rows, j, n, s);
          const int64_t last = least(s.last, n);
          for (int64_t r = 0; r < rows; ++r) {
            const float* line = t.grads + r * kPitch;
            float* sums = grad + (i + r) * a.bias.row + j * a.bias.key;
            if (a.bias.key == 0)
              for (int64_t c = s.first; c < last; ++c) sums[0] += line[c];
            else
              for (int64_t c = s.first; c < last; ++c) sums[c] += line[c];
          }
        }
      }
    }
}

}  // namespace CAPIBARA_ISA
