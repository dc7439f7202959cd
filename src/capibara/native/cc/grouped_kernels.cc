// Blocks of grouped products, compiled once per instruction set. Parts of both operands are copied in the order in
// which a register tile reads them: rows of a matrix that are a power of two apart would meet in the caches. Short rows
// and small matrices do not, and are read where they lie: the copies would take as long as the products.
#include "grouped.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::GroupedBlock;

constexpr int64_t kPanel = kVectors * kWidth;  // columns of a register tile
constexpr int64_t kDeep = 384;                 // summed over at a time
constexpr int64_t kDeepStep = kDeep + 16;
// Floats from a copied panel to the next. Not a power of two: lines of several panels are written in turn.
constexpr int64_t kLeftPanel = kDeep * kRows + 16, kRightPanel = kDeep * kPanel + 16;
constexpr int64_t kMostRows = 360 / kRows * kRows;
constexpr int64_t kMostColumns = 512;
constexpr int64_t kShort = 256;                // numbers from a row of the left matrix to the next
constexpr int64_t kMeeting = 512;              // a multiple of these, longer rows meet in the caches
constexpr int64_t kFew = 4096;                 // numbers of a right matrix that do not meet in the first cache

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows of `a` from k0 on: by row with a step of kDeepStep, or by depth in panels [depth][kRows].
static void pack_a(const GroupedBlock& p, int64_t k0, int64_t depth, float* to) {
  if (!p.a_by_depth) {
    for (int64_t i = 0; i < p.rows; ++i) {
      const float* const from = p.a + i * p.a_step + k0;
      float* const row = to + i * kDeepStep;
      int64_t k = 0;
      for (; k + kWidth <= depth; k += kWidth) store(row + k, load(from + k));
      for (; k < depth; ++k) row[k] = from[k];
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k) {
    const float* const from = p.a + (k0 + k) * p.a_step;
    float* panel = to + k * kRows;
    int64_t i = 0;
    for (; i + kRows <= p.rows; i += kRows, panel += kLeftPanel)
      __builtin_memcpy(panel, from + i, kRows * sizeof(float));
    for (int64_t r = 0; i + r < p.rows; ++r) panel[r] = from[i + r];
  }
}

// Columns of `b` in panels [depth][kPanel], the last one filled up with zeros.
static void pack_b(const GroupedBlock& p, int64_t k0, int64_t depth, float* to) {
  if (!p.b_by_column) {
    for (int64_t k = 0; k < depth; ++k) {
      const float* const from = p.b + (k0 + k) * p.b_step;
      float* panel = to + k * kPanel;
      int64_t j = 0;
      for (; j + kPanel <= p.columns; j += kPanel, panel += kRightPanel)
        for (int64_t l = 0; l < kPanel; l += kWidth) store(panel + l, load(from + j + l));
      if (j < p.columns)
        for (int64_t l = 0; l < kPanel; ++l) panel[l] = j + l < p.columns ? from[j + l] : 0;
    }
    return;
  }
  for (int64_t j = 0; j < p.columns; j += kWidth) {
    float* const panel = to + j / kPanel * kRightPanel + j % kPanel;
    const float* const from = p.b + j * p.b_step + k0;
    const int64_t there = least(p.columns - j, kWidth);
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      Vec rows[kWidth];
      for (int i = 0; i < kWidth; ++i) rows[i] = i < there ? load(from + i * p.b_step + k) : (Vec){};
      transpose(rows);
      for (int i = 0; i < kWidth; ++i) store(panel + (k + i) * kPanel, rows[i]);
    }
    for (; k < depth; ++k)
      for (int64_t l = 0; l < kWidth; ++l) panel[k * kPanel + l] = l < there ? from[l * p.b_step + k] : 0;
  }
}

// Fetches what a small block needs while the block before it is computed, a share of it with each register tile. Its
// memory is mostly in pages that this processor has not seen lately, and such reads would wait one after the other.
class Ahead {
 public:
  Ahead(const GroupedBlock* next, int64_t tiles) {
    if (next == nullptr || next->depth == 0) return;
    const GroupedBlock& p = *next;
    const int64_t a_rows = p.a_by_depth ? p.depth : p.rows, a_columns = p.a_by_depth ? p.rows : p.depth;
    const int64_t b_rows = p.b_by_column ? p.columns : p.depth, b_columns = p.b_by_column ? p.depth : p.columns;
    if (a_rows * a_columns + b_rows * b_columns + p.rows * p.columns > kFetched) return;
    parts_[0] = {p.a, a_rows, a_columns, p.a_step};
    parts_[1] = {p.b, b_rows, b_columns, p.b_step};
    parts_[2] = {p.c, p.rows, p.columns, p.c_step};
    share_ = (a_rows + b_rows + p.rows + tiles - 1) / tiles;
  }

  void fetch() {
    for (int64_t i = 0; i < share_; ++i) {
      while (part_ < 3 && row_ == parts_[part_].rows) ++part_, row_ = 0;
      if (part_ == 3) {
        share_ = 0;
        return;
      }
      const Part& from = parts_[part_];
      const float* const row = from.first + row_++ * from.step;
      for (int64_t j = 0; j < from.columns; j += kLine) __builtin_prefetch(row + j, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 16;           // floats
  static constexpr int64_t kFetched = 64 << 10;  // floats of all three: they stay in the second cache until then
  struct Part {
    const float* first;
    int64_t rows, columns, step;
  };
  Part parts_[3] = {};
  int64_t share_ = 0, part_ = 0, row_ = 0;
};

static void grouped_multiply(const GroupedBlock& p, float* scratch) {
  if (p.depth == 0) {
    for (int64_t i = 0; !p.add && i < p.rows; ++i) __builtin_memset(p.c + i * p.c_step, 0, p.columns * sizeof(float));
    return;
  }
  float* const edge = scratch;  // a tile that is not all within the result
  float* const a = edge + kRows * kPanel;
  float* const b = a + kMostRows * kDeepStep;
  const bool a_lies = !p.a_by_depth && (p.a_step <= kShort || p.a_step % kMeeting != 0);
  // Whole panels only: columns past the last one are not there to be read.
  const bool b_lies = !p.b_by_column && p.depth * p.b_step <= kFew && p.columns % kPanel == 0;
  const int64_t row_step = p.a_by_depth ? 1 : a_lies ? p.a_step : kDeepStep, depth_step = p.a_by_depth ? kRows : 1;
  const int64_t panel_step = b_lies ? p.b_step : kPanel;
  const int64_t tile_step = p.a_by_depth ? kLeftPanel : kRows * kDeepStep;
  // Even shares of the depth: a short last one would be mostly copies.
  const int64_t shares = (p.depth + kDeep - 1) / kDeep, share = (p.depth + shares - 1) / shares;
  Ahead ahead(p.next, shares * ((p.columns + kPanel - 1) / kPanel) * ((p.rows + kRows - 1) / kRows));
  for (int64_t k0 = 0; k0 < p.depth; k0 += share) {
    const int64_t depth = least(share, p.depth - k0);
    const bool add = p.add || k0 > 0;
    if (!a_lies) pack_a(p, k0, depth, a);
    if (!b_lies) pack_b(p, k0, depth, b);
    for (int64_t j = 0; j < p.columns; j += kPanel) {
      const float* const panel = b_lies ? p.b + k0 * p.b_step + j : b + j / kPanel * kRightPanel;
      const int64_t columns = least(kPanel, p.columns - j);
      for (int64_t i = 0; i < p.rows; i += kRows) {
        ahead.fetch();
        const int rows = int(least(kRows, p.rows - i));
        const float* const tile = a_lies ? p.a + i * p.a_step + k0 : a + i / kRows * tile_step;
        float* const c = p.c + i * p.c_step + j;
        if (columns == kPanel) {
          Rows<kRows, kVectors>::run(rows, depth, tile, row_step, depth_step, panel, panel_step, c, p.c_step, add);
          continue;
        }
        if (columns > kWidth)
          Rows<kRows, kVectors>::run(rows, depth, tile, row_step, depth_step, panel, kPanel, edge, kPanel, false);
        else
          Rows<kRows, 1>::run(rows, depth, tile, row_step, depth_step, panel, kPanel, edge, kPanel, false);
        for (int r = 0; r < rows; ++r)
          for (int64_t l = 0; l < columns; ++l)
            c[r * p.c_step + l] = edge[r * kPanel + l] + (add ? c[r * p.c_step + l] : 0);
      }
    }
  }
}

extern const capibara::GroupedKernels kGrouped;
const capibara::GroupedKernels kGrouped = {
    kMostRows, kMostColumns, kRows, kPanel,
    kRows * kPanel + kMostRows * kDeepStep + kMostColumns / kPanel * kRightPanel,
    grouped_multiply};

}  // namespace CAPIBARA_ISA
