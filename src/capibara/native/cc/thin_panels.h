// Products of a few rows with a matrix packed into panels, which is read sequentially. The sums stay in registers for a
// piece of a panel; the piece is then in the first cache for further rows. A row's sums do not depend on the number of
// rows. Included by the kernels.
#pragma once

#include "thin.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::kPanelColumns;

constexpr int kAcross = kPanelColumns / kWidth;  // vectors of a panel's row
// Rows of x whose sums registers hold, beside a panel's row and a number of x.
#if defined(__AVX512F__)
constexpr int kPanelDown = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kPanelDown = 4;
#else
constexpr int kPanelDown = 2;
#endif
constexpr int64_t kPieceRows = 64;    // of a panel
constexpr int64_t kFetchedRows = 32;  // from the row that is read to the one that is fetched
constexpr int64_t kLeastPanels = 8;   // of an item

static int64_t panels_of_item(const capibara::ThinProduct& p) {
  const int64_t panels = p.columns / kPanelColumns, even = (panels + 4 * p.threads - 1) / (4 * p.threads);
  return even < kLeastPanels ? kLeastPanels : even;
}
static int64_t panel_items(const capibara::ThinProduct& p) {
  const int64_t share = panels_of_item(p);
  return p.rows == 0 ? 0 : (p.columns / kPanelColumns + share - 1) / share;
}

// Scratch holds the sums of a panel, and the rows of x transposed so that factors used together are adjacent:
// [rows / kWidth, inner, kWidth]. A single row needs no transposition.
static int64_t turned_blocks(const capibara::ThinProduct& p) {
  return p.rows == 1 ? 0 : (p.rows + kWidth - 1) / kWidth;
}
static int64_t panel_scratch(const capibara::ThinProduct& p) {
  return p.rows * kPanelColumns + turned_blocks(p) * p.inner * kWidth;
}

static void turn_rows(const capibara::ThinProduct& p, float* to) {
  for (int64_t i = 0; i < p.rows; i += kWidth, to += p.inner * kWidth) {
    const float* const from = p.x + i * p.inner;
    const int64_t there = p.rows - i < kWidth ? p.rows - i : kWidth;
    int64_t k = 0;
    for (; k + kWidth <= p.inner; k += kWidth) {
      Vec rows[kWidth];
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r) rows[r] = r < there ? load(from + r * p.inner + k) : (Vec){};
      transpose(rows);
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r) store(to + (k + r) * kWidth, rows[r]);
    }
    for (; k < p.inner; ++k)
      for (int64_t r = 0; r < kWidth; ++r) to[k * kWidth + r] = r < there ? from[r * p.inner + k] : 0;
  }
}

// `depth` rows of a panel, for R rows of x, whose numbers for each lie S apart; the first ones begin the sums.
template <int R, int S, bool fetches, typename T>
static void panel_tile(const T* w, const float* x, int64_t depth, bool begins, float* sums) {
  Vec total[R][kAcross];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kAcross; ++c)
      total[r][c] = begins ? (Vec){} : load(sums + r * kPanelColumns + c * kWidth);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const T* const at = w + k * kPanelColumns;
    if (fetches) __builtin_prefetch(at + kFetchedRows * kPanelColumns);
    Vec row[kAcross];
#pragma GCC unroll 4
    for (int c = 0; c < kAcross; ++c) row[c] = load(at + c * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(x[k * S + r]);
#pragma GCC unroll 4
      for (int c = 0; c < kAcross; ++c) total[r][c] += factor * row[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kAcross; ++c) store(sums + r * kPanelColumns + c * kWidth, total[r][c]);
}

template <int R>
struct PanelRows {
  template <bool fetches, typename T>
  static void run(int64_t rows, const T* w, const float* x, int64_t depth, bool begins, float* sums) {
    if (rows == R)
      panel_tile<R, kWidth, fetches>(w, x, depth, begins, sums);
    else
      PanelRows<R - 1>::template run<fetches>(rows, w, x, depth, begins, sums);
  }
};
template <>
struct PanelRows<0> {
  template <bool fetches, typename T>
  static void run(int64_t, const T*, const float*, int64_t, bool, float*) {}
};

template <typename T>
static void multiply_panels(const capibara::ThinProduct& p, int64_t item, float* scratch) {
  float* const sums = scratch;
  float* const turned = scratch + p.rows * kPanelColumns;
  const int64_t share = panels_of_item(p), all = p.columns / kPanelColumns;
  const int64_t first = item * share, end = first + share < all ? first + share : all;
  if (p.rows > 1) turn_rows(p, turned);
  for (int64_t panel = first; panel < end; ++panel) {
    const T* const w = static_cast<const T*>(p.w.at) + panel * p.inner * kPanelColumns;
    for (int64_t k = 0; k < p.inner || k == 0; k += kPieceRows) {
      const int64_t depth = p.inner - k < kPieceRows ? p.inner - k : kPieceRows;
      const T* const piece = w + k * kPanelColumns;
      if (p.rows == 1) {
        // Processors foresee what one row reads of float32, which fetching would only delay.
        panel_tile<1, 1, sizeof(T) == 2>(piece, p.x + k, depth, k == 0, sums);
        continue;
      }
      for (int64_t i = 0; i < p.rows; i += kPanelDown) {
        const float* const x = turned + i / kWidth * p.inner * kWidth + k * kWidth + i % kWidth;
        const int64_t rows = p.rows - i < kPanelDown ? p.rows - i : kPanelDown;
        if (i == 0)
          PanelRows<kPanelDown>::template run<true>(rows, piece, x, depth, k == 0, sums);
        else
          PanelRows<kPanelDown>::template run<false>(rows, piece, x, depth, k == 0, sums + i * kPanelColumns);
      }
    }
    for (int64_t i = 0; i < p.rows; ++i)
      __builtin_memcpy(p.out + i * p.columns + panel * kPanelColumns, sums + i * kPanelColumns,
                       kPanelColumns * sizeof(float));
  }
}

}  // namespace CAPIBARA_ISA
