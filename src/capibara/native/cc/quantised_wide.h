// Many vectors: a block of the matrix becomes numbers once, packed for a register tile, and is multiplied by all vectors
// of a block.
#pragma once

#include "quantised_across.h"

namespace CAPIBARA_ISA {

constexpr int64_t kPanel = kVectors * kWidth;  // columns of a register tile
constexpr int64_t kDeep = 384;                 // of a block that is summed over; whole chunks
constexpr int64_t kDeepStep = kDeep + 16;      // not a power of two: rows of a tile would meet in the cache
constexpr int64_t kMostRows = 8 * kRows;       // of the matrix, of an item
constexpr int64_t kMostVectors = 512;          // of an item
constexpr int64_t kMostColumns = 8 * kPanel;   // across: of the matrix, of an item
constexpr int64_t kMostAcross = 256;           // across: vectors of an item
constexpr int64_t kLater = 16;                 // across: rows from those that are read to those that are fetched

static_assert(kDeep % Four::kChunk == 0 && kPanel == Four::kChunk, "blocks are whole chunks");

static int64_t wide_rows(const CodesProduct& p) {
  const int64_t blocks = parts(p.count, kMostVectors);
  return least(kMostRows, up(parts(p.w.rows * blocks, 4 * most(p.threads, 1)), kRows));
}
static int64_t wide_columns(const CodesProduct& p) {
  const int64_t blocks = parts(p.count, kMostAcross);
  return least(kMostColumns, up(parts(p.w.inner * blocks, 4 * most(p.threads, 1)), kPanel));
}

// Vectors as panels [count / kPanel][inner, arranged][kPanel], the last one filled up with zeros. An item is a panel's
// part of kDeep columns.
template <typename C>
static void pack_panels(const CodesProduct& p, int64_t item) {
  const int64_t inner = p.w.inner, deep = parts(inner, kDeep);
  const int64_t panel = item / deep, begin = item % deep * kDeep, end = least(begin + kDeep, inner);
  const int64_t n0 = panel * kPanel, there = least(p.count - n0, kPanel);
  const float* const from = p.x + n0 * inner;
  float* const to = p.room + panel * inner * kPanel;
  int64_t k = begin;
  for (; k + C::kChunk <= end; k += C::kChunk)
    for (int64_t lane = 0; lane < kPanel; lane += kWidth) {
      Vec rows[C::kVecs][kWidth];
      for (int i = 0; i < kWidth; ++i) {
        const float* const row = from + (lane + i) * inner + k;
        const bool is = lane + i < there;
        if (C::kVecs == 1) {
          rows[0][i] = is ? load(row) : (Vec){};
        } else {
          const Vec a = is ? load(row) : (Vec){}, b = is ? load(row + kWidth) : (Vec){};
          rows[0][i] = pick(a, b, 2 * lanes());
          rows[C::kVecs - 1][i] = pick(a, b, 2 * lanes() + 1);
        }
      }
      for (int v = 0; v < C::kVecs; ++v) {
        transpose(rows[v]);
        for (int i = 0; i < kWidth; ++i) store(to + (k + v * kWidth + i) * kPanel + lane, rows[v][i]);
      }
    }
  for (; k < end; ++k)
    for (int64_t lane = 0; lane < kPanel; ++lane) to[k * kPanel + lane] = lane < there ? from[lane * inner + k] : 0;
}

template <typename C>
static void wide(const CodesProduct& p, int64_t item, float* scratch) {
  const Codes& w = p.w;
  const int64_t share = wide_rows(p), down = parts(w.rows, share), inner = w.inner;
  const int64_t row0 = item % down * share, height = least(share, w.rows - row0);
  const int64_t n0 = item / down * kMostVectors, vectors = least(kMostVectors, p.count - n0);
  const int64_t step = up(vectors, kPanel) + 16;
  const typename C::Table table(w);
  float* const block = scratch;
  float* const sums = scratch + kMostRows * kDeepStep;
  for (int64_t k0 = 0; k0 < inner; k0 += kDeep) {
    const int64_t depth = least(kDeep, inner - k0);
    for (int64_t r = 0; r < height; ++r) {
      float* const to = block + r * kDeepStep - k0;
      numbers<C>(
          w, table, row0 + r, k0, k0 + depth,
          [&](int64_t k, const Vec* values) {
            for (int v = 0; v < C::kVecs; ++v) store(to + k + v * kWidth, values[v]);
          },
          [&](int64_t k, float value) { to[k] = value; });
    }
    for (int64_t n = 0; n < vectors; n += kPanel) {
      const float* const panel = p.room + (n0 + n) * inner + k0 * kPanel;
      for (int64_t r = 0; r < height; r += kRows) {
        const int rows = int(least(kRows, height - r));
        const float* const a = block + r * kDeepStep;
        float* const to = sums + r * step + n;
        if (vectors - n > kWidth)
          Rows<kRows, kVectors>::run(rows, depth, a, kDeepStep, 1, panel, kPanel, to, step, k0 > 0);
        else
          Rows<kRows, 1>::run(rows, depth, a, kDeepStep, 1, panel, kPanel, to, step, k0 > 0);
      }
    }
  }
  float* const out = p.out + n0 * w.rows + row0;
  for (int64_t r = 0; r < height; r += kWidth)
    for (int64_t n = 0; n < vectors; n += kWidth) {
      const float* const from = sums + r * step + n;
      float* const to = out + n * w.rows + r;
      if (r + kWidth <= height && n + kWidth <= vectors) {
        Vec rows[kWidth];
        for (int i = 0; i < kWidth; ++i) rows[i] = load(from + i * step);
        transpose(rows);
        for (int i = 0; i < kWidth; ++i) store(to + i * w.rows, rows[i]);
        continue;
      }
      for (int64_t i = 0; i < least(kWidth, vectors - n); ++i)
        for (int64_t j = 0; j < least(kWidth, height - r); ++j) to[i * w.rows + j] = from[j * step + i];
    }
}

// Across, vectors as [rows / kDeep][count][kDeepStep]. An item is a block of kDeep of the rows.
static void pack_blocks(const CodesProduct& p, int64_t item) {
  const int64_t r0 = item * kDeep, depth = least(kDeep, p.w.rows - r0);
  float* to = p.room + item * p.count * kDeepStep;
  for (int64_t n = 0; n < p.count; ++n, to += kDeepStep) {
    const float* const from = p.x + n * p.w.rows + r0;
    for (int64_t r = 0; r < depth; ++r) to[r] = from[r];
  }
}

template <typename C>
static void wide_across(const CodesProduct& p, int64_t item, float* scratch) {
  const Codes& w = p.w;
  const int64_t share = wide_columns(p), along = parts(w.inner, share);
  const int64_t c0 = item % along * share, columns = least(share, w.inner - c0), padded = up(columns, kPanel);
  const int64_t n0 = item / along * kMostAcross, vectors = least(kMostAcross, p.count - n0);
  const int64_t step = padded + 16, panel_size = kDeep * kPanel;
  const typename C::Table table(w);
  float* const panels = scratch;
  float* const sums = scratch + kDeep * kMostColumns;
  if (padded > columns)  // lanes that nobody reads
    for (int64_t r = 0; r < kDeep; ++r)
      for (int64_t l = 0; l < kPanel; ++l) panels[(padded / kPanel - 1) * panel_size + r * kPanel + l] = 0;
  for (int64_t r0 = 0; r0 < w.rows; r0 += kDeep) {
    const int64_t depth = least(kDeep, w.rows - r0);
    for (int64_t r = 0; r < depth; ++r) {
      float* const to = panels + r * kPanel;
      const auto place = [&](int64_t k) { return to + (k - c0) / kPanel * panel_size + (k - c0) % kPanel; };
      // Pieces of rows lie too far apart for processors to foresee the next ones.
      const uint8_t* const later = w.codes + (r0 + r + kLater) * w.width;
      for (int64_t b = C::byte(c0); b < C::byte(c0 + columns); b += 64) __builtin_prefetch(later + b);
      numbers<C>(
          w, table, r0 + r, c0, c0 + columns,
          [&](int64_t k, const Vec* values) {
            float* const at = place(k);
            for (int v = 0; v < C::kVecs; ++v) store(at + v * kWidth, values[v]);
          },
          [&](int64_t k, float value) { *place(k) = value; });
    }
    const float* const a = p.room + (r0 / kDeep * p.count + n0) * kDeepStep;
    for (int64_t j = 0; j < padded; j += kPanel)
      for (int64_t n = 0; n < vectors; n += kRows)
        Rows<kRows, kVectors>::run(int(least(kRows, vectors - n)), depth, a + n * kDeepStep, kDeepStep, 1,
                                   panels + j / kPanel * panel_size, kPanel, sums + n * step + j, step, r0 > 0);
  }
  const int64_t whole = columns - columns % C::kChunk;
  for (int64_t n = 0; n < vectors; ++n) {
    const float* const from = sums + n * step;
    float* const to = p.out + (n0 + n) * w.inner + c0;
    int64_t k = 0;
    if (C::kVecs == 2) {
      const IntVec order = lanes() / 2 + (lanes() & 1) * kWidth;
      for (; k < whole; k += C::kChunk) {
        const Vec a = load(from + k), b = load(from + k + kWidth);
        store(to + k, pick(a, b, order));
        store(to + k + kWidth, pick(a, b, order + kWidth / 2));
      }
    }
    for (; k < columns; ++k) to[k] = from[k];
  }
}

}  // namespace CAPIBARA_ISA
