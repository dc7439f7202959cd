// Products of a few rows with a matrix, compiled once per instruction set. What takes the time is reading the matrix:
// it is read once, in the order in which it lies, and nothing of it is copied. A row's sums do not depend on how many
// rows there are, from two on, nor on the number of threads.
#include "thin.h"

#include "fetch.h"
#include "thin_panels.h"
#include "thin_rows.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::ThinProduct;

constexpr int kTogether = 8;        // rows that share what is read
constexpr int kDeep = 8;            // rows of the matrix that are read side by side
constexpr int64_t kMostWide = 2048;  // columns of an item: its sums stay in the cache
constexpr int64_t kLeastWide = 128;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }

// Columns of an item: several for each thread, so that they end together.
static int64_t wide(const ThinProduct& p) {
  const int64_t even = parts(parts(p.columns, 4 * p.threads), kWidth) * kWidth;
  return even < kLeastWide ? kLeastWide : least(even, kMostWide);
}

// One row alone: memory is read fastest a piece at a time, so an item has whole rows of the matrix, or long pieces of
// them, and sums of its own, which are added in the order of items.
constexpr int64_t kWhole = 16384;  // columns
constexpr int64_t kPiece = 128;    // rows of the matrix, half as many of long ones
constexpr int64_t kLong = 1024;    // columns

static bool is_alone(const ThinProduct& p) { return p.rows == 1 && !p.by_column && !p.panels; }
static int64_t piece(const ThinProduct& p) { return p.columns > kLong ? kPiece / 2 : kPiece; }
static int64_t pieces(const ThinProduct& p) { return p.inner == 0 ? 1 : parts(p.inner, piece(p)); }
// From the sums of an item to those of the next. Not a power of two: they would meet in the caches.
static int64_t apart(const ThinProduct& p) { return parts(least(p.columns, kWhole), 16) * 16 + 16; }

static int64_t thin_items(const ThinProduct& p) {
  if (p.panels) return panel_items(p);
  if (is_alone(p)) return parts(p.columns, kWhole) * pieces(p);
  return p.rows == 0 ? 0 : parts(p.columns, wide(p));
}
static int64_t thin_room(const ThinProduct& p) { return is_alone(p) ? thin_items(p) * apart(p) : 0; }
static int64_t thin_block(const ThinProduct& p) { return is_alone(p) ? pieces(p) : 0; }

// The matrix, whose numbers are T.
template <typename T>
static inline __attribute__((always_inline)) const T* matrix(const ThinProduct& p) {
  return static_cast<const T*>(p.w.at);
}

// C vectors, of D rows of the matrix that are `columns` apart.
template <int C, int D, typename T>
static inline __attribute__((always_inline)) void add_vectors_alone(const Vec (&factors)[D], const T* w,
                                                                    int64_t columns, bool begins, float* sums) {
  Vec total[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) total[c] = begins ? (Vec){} : load(sums + c * kWidth);
#pragma GCC unroll 16
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[c] += factors[d] * load(w + d * columns + c * kWidth);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) store(sums + c * kWidth, total[c]);
}

// D rows of the matrix from k on; the first ones of an item begin its sums.
template <int D, typename T>
static inline __attribute__((always_inline)) void add_alone(const ThinProduct& p, int64_t k, bool begins, int64_t first,
                                                            int64_t width, float* sums) {
  constexpr int kAbreast = 4;  // vectors: as many sums do not wait for each other
  Vec factors[D];
#pragma GCC unroll 16
  for (int d = 0; d < D; ++d) factors[d] = splat(p.x[k + d]);
  const T* const w = matrix<T>(p) + k * p.columns + first;
  int64_t j = 0;
  for (; j + kAbreast * kWidth <= width; j += kAbreast * kWidth)
    add_vectors_alone<kAbreast, D>(factors, w + j, p.columns, begins, sums + j);
  for (; j + kWidth <= width; j += kWidth) add_vectors_alone<1, D>(factors, w + j, p.columns, begins, sums + j);
  for (; j < width; ++j) {
    float total = begins ? 0 : sums[j];
    for (int d = 0; d < D; ++d) total += p.x[k + d] * number(w[d * p.columns + j]);
    sums[j] = total;
  }
}

template <int D, typename T>
static void multiply_alone(const ThinProduct& p, int64_t item, float* sums) {
  const int64_t first = item / pieces(p) * kWhole, width = least(kWhole, p.columns - first);
  const int64_t begin = item % pieces(p) * piece(p), end = least(begin + piece(p), p.inner);
  int64_t k = begin;
  for (; k + D <= end; k += D) add_alone<D, T>(p, k, k == begin, first, width, sums);
  for (; k < end; ++k) add_alone<1, T>(p, k, k == begin, first, width, sums);
  if (begin >= end)
    for (int64_t j = 0; j < width; ++j) sums[j] = 0;
}

// Columns of one block of items.
static void add_pieces(const ThinProduct& p, int64_t block, int64_t first, int64_t width) {
  const int64_t count = pieces(p), step = apart(p);
  const float* const from = p.room + block * count * step + first - block * kWhole;
  float* const to = p.out + first;
  int64_t j = 0;
  for (; j + kWidth <= width; j += kWidth) {
    Vec total = load(from + j);
    for (int64_t i = 1; i < count; ++i) total += load(from + i * step + j);
    store(to + j, total);
  }
  for (; j < width; ++j) {
    float total = from[j];
    for (int64_t i = 1; i < count; ++i) total += from[i * step + j];
    to[j] = total;
  }
}

static void thin_finish(const ThinProduct& p, int64_t block) {
  add_pieces(p, block, block * kWhole, least(kWhole, p.columns - block * kWhole));
}

// Only of one row alone there is something to finish.
static void thin_finish_columns(const ThinProduct& p, int64_t, int64_t first, int64_t count) {
  if (!is_alone(p)) return;
  for (int64_t width; count > 0; first += width, count -= width) {
    width = least(count, kWhole - first % kWhole);
    add_pieces(p, first / kWhole, first, width);
  }
}

// One row with C columns of the matrix, which lie one after the other.
template <int C, typename T>
static inline void dot_alone(const ThinProduct& p, int64_t j) {
  const T* const w = matrix<T>(p) + j * p.inner;
  Vec total[C] = {};
  int64_t k = 0;
  for (; k + kWidth <= p.inner; k += kWidth) {
    const Vec row = load(p.x + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[c] += row * load(w + c * p.inner + k);
  }
  for (int c = 0; c < C; ++c) {
    float found = sum(total[c]);
    for (int64_t l = k; l < p.inner; ++l) found += p.x[l] * number(w[c * p.inner + l]);
    p.out[j + c] = found;
  }
}

// Sums lie in scratch, one row of it for each of x: rows of the result may be a power of two apart, as those of the
// matrix may, and would meet in the caches.
static int64_t step(const ThinProduct& p) { return wide(p) + 16; }

// Vectors of a matrix's row that R rows of x take at once: as many sums as registers hold beside them. Each number of x
// is read once for all of these.
constexpr int kSums = kWidth >= 16 ? 16 : 8;
template <int R>
constexpr int kTaken = kSums / R > 4 ? 4 : kSums / R;
constexpr int64_t kAhead = 512;  // bytes from columns that are read to those that are fetched

// C vectors, of D rows of the matrix that are `columns` apart, for R rows of x.
template <int R, int C, int D, typename T>
static inline __attribute__((always_inline)) void add_vectors(const float (&factors)[D][R], const T* w, const T* ahead,
                                                              int64_t columns, bool begins, float* sums,
                                                              int64_t down) {
  Vec total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = begins ? (Vec){} : load(sums + r * down + c * kWidth);
#pragma GCC unroll 8
  for (int d = 0; d < D; ++d) {
    Vec row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      row[c] = load(w + d * columns + c * kWidth);
      __builtin_prefetch(ahead + d * columns + c * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(factors[d][r]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) total[r][c] += factor * row[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums + r * down + c * kWidth, total[r][c]);
}

// D rows of the matrix from k on, for R rows of x.
template <int R, int D, typename T>
static void add_rows(const ThinProduct& p, int64_t i, int64_t k, int64_t first, int64_t width, float* sums) {
  float factors[D][R];
  for (int d = 0; d < D; ++d)
    for (int r = 0; r < R; ++r) factors[d][r] = p.x[(i + r) * p.inner + k + d];
  const T* const w = matrix<T>(p) + k * p.columns + first;
  const int64_t down = step(p), far = least(kAhead / int64_t(sizeof(T)), width);
  sums += i * down;
  // Past the end of these rows the next ones begin.
  const auto ahead = [&](int64_t j) { return j + far < width ? w + j + far : w + D * p.columns + j + far - width; };
  constexpr int C = kTaken<R>;
  int64_t j = 0;
  for (; j + C * kWidth <= width; j += C * kWidth)
    add_vectors<R, C, D>(factors, w + j, ahead(j), p.columns, k == 0, sums + j, down);
  for (; j + kWidth <= width; j += kWidth)
    add_vectors<R, 1, D>(factors, w + j, ahead(j), p.columns, k == 0, sums + j, down);
  if (j == width) return;
  // A vector as well: compilers contract a*b + c in some loops over single columns and not in others, and the last bits
  // of a row would depend on R.
  float last[D * kWidth] = {};
  for (int d = 0; d < D; ++d)
    for (int64_t l = j; l < width; ++l) last[d * kWidth + l - j] = number(w[d * p.columns + l]);
  const float* const next = reinterpret_cast<const float*>(ahead(j));  // which is fetched only
  add_vectors<R, 1, D>(factors, last, next, kWidth, k == 0, sums + j, down);
}

template <int D, typename T>
static void add_block(const ThinProduct& p, int64_t k, int64_t first, int64_t width, float* sums) {
  int64_t i = 0;
  for (; i + kTogether <= p.rows; i += kTogether) add_rows<kTogether, D, T>(p, i, k, first, width, sums);
  for (; i + 4 <= p.rows; i += 4) add_rows<4, D, T>(p, i, k, first, width, sums);
  for (; i + 2 <= p.rows; i += 2) add_rows<2, D, T>(p, i, k, first, width, sums);
  for (; i < p.rows; ++i) add_rows<1, D, T>(p, i, k, first, width, sums);
}

// R rows of x with C columns of the matrix, which lie one after the other.
template <int R, int C, typename T>
static void dot_columns(const ThinProduct& p, int64_t i, int64_t j) {
  const float* const x = p.x + i * p.inner;
  const T* const w = matrix<T>(p) + j * p.inner;
  Vec total[R][C] = {};
  int64_t k = 0;
  for (; k + kWidth <= p.inner; k += kWidth) {
    Vec column[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      column[c] = load(w + c * p.inner + k);
      __builtin_prefetch(w + (C + c) * p.inner + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec row = load(x + r * p.inner + k);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) total[r][c] += row * column[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float found = sum(total[r][c]);
      for (int64_t l = k; l < p.inner; ++l) found += x[r * p.inner + l] * number(w[c * p.inner + l]);
      p.out[(i + r) * p.columns + j + c] = found;
    }
}

template <int C, typename T>
static void dot_block(const ThinProduct& p, int64_t j) {
  constexpr int kMany = kWidth >= 16 ? 8 : 4;  // with two columns their sums are held in registers
  int64_t i = 0;
  for (; i + kMany <= p.rows; i += kMany) dot_columns<kMany, C, T>(p, i, j);
  for (; i + 2 <= p.rows; i += 2) dot_columns<2, C, T>(p, i, j);
  for (; i < p.rows; ++i) dot_columns<1, C, T>(p, i, j);
}

static int64_t thin_scratch(const ThinProduct& p) {
  if (p.panels) return panel_scratch(p);
  return p.by_column || is_alone(p) ? 1 : p.rows * step(p);
}

template <typename T>
static void multiply(const ThinProduct& p, int64_t item, float* sums) {
  if (p.panels) return multiply_panels<T>(p, item, sums);
  if (is_alone(p)) {
    float* const own = p.room + item * apart(p);
    return p.columns > kLong ? multiply_alone<8, T>(p, item, own) : multiply_alone<16, T>(p, item, own);
  }
  const int64_t first = item * wide(p), width = least(wide(p), p.columns - first);
  if (p.by_column) {
    int64_t j = first;
    if (p.rows == 1) {
      for (; j + 8 <= first + width; j += 8) dot_alone<8, T>(p, j);
      for (; j < first + width; ++j) dot_alone<1, T>(p, j);
      return;
    }
    for (; j + 2 <= first + width; j += 2) dot_block<2, T>(p, j);
    for (; j < first + width; ++j) dot_block<1, T>(p, j);
    return;
  }
  if (p.inner == 0)
    for (int64_t i = 0; i < p.rows * step(p); ++i) sums[i] = 0;
  int64_t k = 0;
  for (; k + kDeep <= p.inner; k += kDeep) add_block<kDeep, T>(p, k, first, width, sums);
  for (; k < p.inner; ++k) add_block<1, T>(p, k, first, width, sums);
  for (int64_t i = 0; i < p.rows; ++i)
    __builtin_memcpy(p.out + i * p.columns + first, sums + i * step(p), width * sizeof(float));
}

static void thin_multiply(const ThinProduct& p, int64_t item, float* sums) {
  p.w.narrow ? multiply<uint16_t>(p, item, sums) : multiply<float>(p, item, sums);
}

static bool thin_fetch(const ThinProduct& p, int64_t item, int64_t part) {
  const auto bring = [&](int64_t first, int64_t count) {
    const char* const from = static_cast<const char*>((p.w + first).at);
    for (int64_t j = 0; j < count * p.w.bytes(); j += 64) __builtin_prefetch(from + j, 0, 2);
  };
  const int64_t numbers = kPart / p.w.bytes();
  int64_t end;
  if (p.panels) {
    const int64_t share = panels_of_item(p), left = p.columns / kPanelColumns - item * share;
    const int64_t from = part * numbers, all = least(share, left) * kPanelColumns * p.inner;
    bring(item * share * kPanelColumns * p.inner + from, least(numbers, all - from));
    end = parts(all, numbers);
  } else if (is_alone(p)) {
    const int64_t width = least(kWhole, p.columns - item / pieces(p) * kWhole), across = parts(width, numbers);
    const int64_t k = item % pieces(p) * piece(p) + part / across, first = part % across * numbers;
    if (k >= p.inner) return false;
    bring(k * p.columns + item / pieces(p) * kWhole + first, least(numbers, width - first));
    end = least(piece(p), p.inner - item % pieces(p) * piece(p)) * across;
  } else {
    const int64_t first = item * wide(p), width = least(wide(p), p.columns - first);
    if (p.by_column) {
      const int64_t from = part * numbers, all = width * p.inner;
      bring(first * p.inner + from, least(numbers, all - from));
      end = parts(all, numbers);
    } else {
      const int64_t rows = numbers / width > 0 ? numbers / width : 1;
      for (int64_t k = part * rows; k < least((part + 1) * rows, p.inner); ++k)
        bring(k * p.columns + first, width);
      end = parts(p.inner, rows);
    }
  }
  return part + 1 < least(end, kMostParts);
}

extern const capibara::ThinKernels kThin;
const capibara::ThinKernels kThin = {thin_items,  thin_scratch,        thin_room,  thin_block, thin_multiply,
                                     thin_finish, thin_finish_columns, thin_fetch, rows_norm,  rows_add, rows_gate};

}  // namespace CAPIBARA_ISA
