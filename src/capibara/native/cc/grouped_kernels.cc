// Blocks of grouped products, compiled once per instruction set. Parts of both operands are copied in the order in
// which a register tile reads them: rows of a matrix that are a power of two apart would meet in the caches. Short rows
// and small matrices do not, and are read where they lie: the copies would take as long as the products.
#include "grouped.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::GroupedBlock;

constexpr int64_t kPanel = kVectors * kWidth;  // columns of a register tile
constexpr int64_t kDeep = 384;                 // summed over at a time
constexpr int64_t kDeepColumns = 256;          // the same, where columns are multiplied: what comes next is fetched too
constexpr int64_t kFewRows = 192 / kRows * kRows, kNarrow = 256 / kPanel * kPanel;
constexpr int64_t kDeepStep = kDeep + 16;
// Floats from a copied panel to the next. Not a power of two: lines of several panels are written in turn.
constexpr int64_t kLeftPanel = kDeep * kRows + 16, kRightPanel = kDeep * kPanel + 16;
constexpr int64_t kMostRows = 360 / kRows * kRows;
constexpr int64_t kMostColumns = 1024 / kPanel * kPanel;
constexpr int64_t kShort = 256;                // numbers from a row of the left matrix to the next
constexpr int64_t kMeeting = 512;              // a multiple of these, longer rows meet in the caches
constexpr int64_t kFew = 4096;                 // numbers of a right matrix that do not meet in the first cache

constexpr int64_t kFetched = 64 << 10;         // floats that stay in the second cache until they are needed
constexpr int64_t kFetchedDeeper = 144 << 10;  // beside copies of this many

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `count` rows of `a`, from k0 on: by row with a step of kDeepStep, or by depth in panels [depth][kRows].
static void pack_a(const GroupedBlock& p, int64_t first, int64_t count, int64_t k0, int64_t depth, float* to) {
  if (!p.a_by_depth) {
    for (int64_t i = 0; i < count; ++i) {
      const float* const from = p.a + (first + i) * p.a_step + k0;
      float* const row = to + i * kDeepStep;
      int64_t k = 0;
      for (; k + kWidth <= depth; k += kWidth) store(row + k, load(from + k));
      for (; k < depth; ++k) row[k] = from[k];
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k) {
    const float* const from = p.a + (k0 + k) * p.a_step + first;
    float* panel = to + k * kRows;
    int64_t i = 0;
    for (; i + kRows <= count; i += kRows, panel += kLeftPanel)
      __builtin_memcpy(panel, from + i, kRows * sizeof(float));
    for (int64_t r = 0; i + r < count; ++r) panel[r] = from[i + r];
  }
}

// Columns of `b`, whose numbers are T, in panels [depth][kPanel], the last one filled up with zeros.
template <typename T>
static void pack_as(const GroupedBlock& p, int64_t k0, int64_t depth, float* to) {
  const T* const b = static_cast<const T*>(p.b.at);
  if (!p.b_by_column) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* const from = b + (k0 + k) * p.b_step;
      float* panel = to + k * kPanel;
      int64_t j = 0;
      for (; j + kPanel <= p.columns; j += kPanel, panel += kRightPanel)
        for (int64_t l = 0; l < kPanel; l += kWidth) store(panel + l, load(from + j + l));
      if (j < p.columns)
        for (int64_t l = 0; l < kPanel; ++l) panel[l] = j + l < p.columns ? number(from[j + l]) : 0;
    }
    return;
  }
  for (int64_t j = 0; j < p.columns; j += kWidth) {
    float* const panel = to + j / kPanel * kRightPanel + j % kPanel;
    const T* const from = b + j * p.b_step + k0;
    const int64_t there = least(p.columns - j, kWidth);
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      Vec rows[kWidth];
      for (int i = 0; i < kWidth; ++i) rows[i] = i < there ? load(from + i * p.b_step + k) : (Vec){};
      transpose(rows);
      for (int i = 0; i < kWidth; ++i) store(panel + (k + i) * kPanel, rows[i]);
    }
    for (; k < depth; ++k)
      for (int64_t l = 0; l < kWidth; ++l) panel[k * kPanel + l] = l < there ? number(from[l * p.b_step + k]) : 0;
  }
}

// The same for a matrix that is already packed, but narrow or into panels of another width. The last panel is not filled
// up with zeros: columns are a multiple of kWidth, and register tiles read only those vectors.
template <typename T>
static void pack_panels_as(const GroupedBlock& p, int64_t k0, int64_t depth, float* to) {
  for (int64_t j = 0; j < p.columns; j += kWidth) {
    float* const panel = to + j / kPanel * kRightPanel + j % kPanel;
    const T* const from = static_cast<const T*>(p.in_panel(k0, j).at);
    for (int64_t k = 0; k < depth; ++k) store(panel + k * kPanel, load(from + k * capibara::kPanelColumns));
  }
}

static void pack_b(const GroupedBlock& p, int64_t k0, int64_t depth, float* to) {
  if (p.b_panel != 0)
    return p.b.narrow ? pack_panels_as<uint16_t>(p, k0, depth, to) : pack_panels_as<float>(p, k0, depth, to);
  p.b.narrow ? pack_as<uint16_t>(p, k0, depth, to) : pack_as<float>(p, k0, depth, to);
}

// Fetches what will be read soon while something else is computed, a share of it with each register tile: a small block
// after this one, whose memory is mostly in pages that this processor has not seen lately, or what is summed over next.
// Such reads would wait one after the other.
class Ahead {
 public:
  Ahead(int64_t most, int64_t tiles) : most_(most), tiles_(tiles) {}

  // The operands' parts for `depth` sums from k0 on.
  void add(const GroupedBlock& p, int64_t k0, int64_t depth) {
    add(p.a_by_depth ? p.a + k0 * p.a_step : p.a + k0, p.a_by_depth ? depth : p.rows, p.a_by_depth ? p.rows : depth,
        p.a_step);
    for (const GroupedBlock* q = &p; q != nullptr; q = q->beside) add_b(*q, k0, depth);
  }
  // The right one's.
  void add_b(const GroupedBlock& p, int64_t k0, int64_t depth) {
    const int64_t panels = (p.columns + capibara::kPanelColumns - 1) / capibara::kPanelColumns;
    if (p.b_panel != 0)
      add(p.in_panel(k0, 0), panels, depth * capibara::kPanelColumns, p.b_panel);
    else if (p.b_by_column)
      add(p.b + k0, p.columns, depth, p.b_step);
    else
      add(p.b + k0 * p.b_step, depth, p.columns, p.b_step);
  }
  void add(capibara::Numbers first, int64_t rows, int64_t columns, int64_t step) {
    if (count_ == kParts || columns == 0) return;
    parts_[count_++] = {first, rows, columns, step};
    rows_ += rows, numbers_ += rows * columns;
    share_ = numbers_ > most_ ? 0 : (rows_ + tiles_ - 1) / tiles_;
  }

  void fetch() {
    for (int64_t i = 0; i < share_; ++i) {
      while (part_ < count_ && row_ == parts_[part_].rows) ++part_, row_ = 0;
      if (part_ == count_) {
        share_ = 0;
        return;
      }
      const Part& from = parts_[part_];
      const capibara::Numbers row = from.first + row_++ * from.step;
      const int64_t bytes = from.columns * row.bytes();
      for (int64_t j = 0; j < bytes; j += kLine) __builtin_prefetch(static_cast<const char*>(row.at) + j, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  static constexpr int64_t kParts = 6;
  struct Part {
    capibara::Numbers first;
    int64_t rows, columns, step;
  };
  Part parts_[kParts] = {};
  const int64_t most_, tiles_;
  int64_t count_ = 0, rows_ = 0, numbers_ = 0, share_ = 0, part_ = 0, row_ = 0;
};

// Whether register tiles can read the packed b in place.
static inline bool lies_in_panels(const GroupedBlock& p) {
  return p.b_panel != 0 && !p.b.narrow && kPanel <= capibara::kPanelColumns;
}

// A register tile of the result, rows from i and columns from j on; `edge` is room for one that is not all within it.
static inline void put_tile(const GroupedBlock& p, int64_t i, int64_t j, int64_t depth, const float* tile,
                            int64_t row_step, int64_t depth_step, const float* panel, int64_t panel_step, bool add,
                            float* edge) {
  const int rows = int(least(kRows, p.rows - i));
  const int64_t columns = least(kPanel, p.columns - j);
  float* const c = p.c + i * p.c_step + j;
  if (columns == kPanel) {
    Rows<kRows, kVectors>::run(rows, depth, tile, row_step, depth_step, panel, panel_step, c, p.c_step, add);
    return;
  }
  if (columns > kWidth)
    Rows<kRows, kVectors>::run(rows, depth, tile, row_step, depth_step, panel, kPanel, edge, kPanel, false);
  else
    Rows<kRows, 1>::run(rows, depth, tile, row_step, depth_step, panel, kPanel, edge, kPanel, false);
  for (int r = 0; r < rows; ++r)
    for (int64_t l = 0; l < columns; ++l)
      c[r * p.c_step + l] = edge[r * kPanel + l] + (add ? c[r * p.c_step + l] : 0);
}

// Of few rows most of the time goes into reading the right matrix, each number of which is needed a few times: narrow
// blocks, and what comes next is fetched while a block is computed.
static void multiply_few_rows(const GroupedBlock& p, float* scratch) {
  float* const edge = scratch;
  float* const a = edge + kRows * kPanel;
  float* const b = a + kMostRows * kDeepStep;
  const bool a_lies = p.a_step <= kShort || p.a_step % kMeeting != 0;
  const int64_t row_step = a_lies ? p.a_step : kDeepStep;
  const int64_t shares = (p.depth + kDeepColumns - 1) / kDeepColumns, share = (p.depth + shares - 1) / shares;
  for (int64_t j0 = 0; j0 < p.columns; j0 += kNarrow) {
    GroupedBlock block = p;
    block.skip(j0);
    block.columns = least(kNarrow, p.columns - j0);
    const bool lies = lies_in_panels(block);
    for (int64_t k0 = 0; k0 < p.depth; k0 += share) {
      const int64_t depth = least(share, p.depth - k0);
      Ahead ahead(kFetchedDeeper, (block.columns + kPanel - 1) / kPanel * ((p.rows + kRows - 1) / kRows));
      if (k0 + share < p.depth) {
        ahead.add_b(block, k0 + share, least(share, p.depth - k0 - share));
      } else if (j0 + kNarrow < p.columns) {
        GroupedBlock next = block;
        next.skip(kNarrow);
        next.columns = least(kNarrow, p.columns - j0 - kNarrow);
        ahead.add_b(next, 0, share);
      }
      if (!a_lies) pack_a(p, 0, p.rows, k0, depth, a);
      if (!lies) pack_b(block, k0, depth, b);
      for (int64_t j = 0; j < block.columns; j += kPanel) {
        const float* const panel =
            lies ? static_cast<const float*>(block.in_panel(k0, j).at) : b + j / kPanel * kRightPanel;
        const int64_t panel_step = lies ? capibara::kPanelColumns : kPanel;
        for (int64_t i = 0; i < p.rows; i += kRows) {
          ahead.fetch();
          const float* const tile = a_lies ? p.a + i * p.a_step + k0 : a + i * kDeepStep;
          put_tile(block, i, j, depth, tile, row_step, 1, panel, panel_step, p.add || k0 > 0, edge);
        }
      }
    }
  }
}

static void grouped_multiply(const GroupedBlock& p, float* scratch) {
  if (p.depth == 0) {
    for (const GroupedBlock* q = &p; q != nullptr; q = q->beside)
      for (int64_t i = 0; !q->add && i < q->rows; ++i) __builtin_memset(q->c + i * q->c_step, 0, q->columns * sizeof(float));
    return;
  }
  if (!p.a_by_depth && !p.b_by_column && p.rows <= kFewRows && p.depth * p.columns > kFew && p.beside == nullptr &&
      p.next == nullptr)
    return multiply_few_rows(p, scratch);
  float* const edge = scratch;  // a tile that is not all within the result
  float* const a = edge + kRows * kPanel;
  float* const b = a + kMostRows * kDeepStep;
  const bool a_lies = !p.a_by_depth && (p.a_step <= kShort || p.a_step % kMeeting != 0);
  const int64_t row_step = p.a_by_depth ? 1 : a_lies ? p.a_step : kDeepStep, depth_step = p.a_by_depth ? kRows : 1;
  const int64_t tile_step = p.a_by_depth ? kLeftPanel : kRows * kDeepStep;
  // Even shares of the depth: a short last one would be mostly copies.
  const int64_t deepest = p.a_by_depth ? kDeepColumns : kDeep;
  const int64_t shares = (p.depth + deepest - 1) / deepest, share = (p.depth + shares - 1) / shares;
  int64_t tiles = 0;
  for (const GroupedBlock* q = &p; q != nullptr; q = q->beside)
    tiles += (q->columns + kPanel - 1) / kPanel * ((q->rows + kRows - 1) / kRows);
  Ahead ahead(kFetched, shares * tiles);
  if (p.next != nullptr && p.next->depth > 0) {
    ahead.add(*p.next, 0, p.next->depth);
    ahead.add(p.next->c, p.next->rows, p.next->columns, p.next->c_step);
  }
  for (int64_t k0 = 0; k0 < p.depth; k0 += share) {
    const int64_t depth = least(share, p.depth - k0);
    Ahead deeper(kFetchedDeeper, tiles);
    if (p.a_by_depth && k0 + share < p.depth) deeper.add(p, k0 + share, least(share, p.depth - k0 - share));
    for (const GroupedBlock* q = &p; q != nullptr; q = q->beside) {
      // Whole panels only: columns past the last one are not there to be read.
      const bool few = q->depth * q->b_step <= kFew;
      const bool in_panels = lies_in_panels(*q);
      const bool b_lies =
          in_panels || (few && q->b_panel == 0 && !q->b.narrow && !q->b_by_column && q->columns % kPanel == 0);
      const float* const lying = static_cast<const float*>(q->b.at) + k0 * q->b_step;
      const int64_t panel_step = in_panels ? capibara::kPanelColumns : b_lies ? q->b_step : kPanel;
      const bool add = q->add || k0 > 0;
      if (!b_lies) pack_b(*q, k0, depth, b);
      for (int64_t first = 0; first < q->rows; first += kMostRows) {
        const int64_t count = least(kMostRows, q->rows - first);
        // All rows at once are copied once for all that is beside.
        if (!a_lies && (q == &p || count < q->rows)) pack_a(p, first, count, k0, depth, a);
        for (int64_t j = 0; j < q->columns; j += kPanel) {
          const float* const panel = in_panels ? static_cast<const float*>(q->in_panel(k0, j).at)
                                     : b_lies  ? lying + j
                                               : b + j / kPanel * kRightPanel;
          for (int64_t i = 0; i < count; i += kRows) {
            ahead.fetch();
            deeper.fetch();
            const float* const tile = a_lies ? p.a + (first + i) * p.a_step + k0 : a + i / kRows * tile_step;
            put_tile(*q, first + i, j, depth, tile, row_step, depth_step, panel, panel_step, add, edge);
          }
        }
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
