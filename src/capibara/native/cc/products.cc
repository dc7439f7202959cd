// Products of the same rows with several matrices, and their gradients, as XLA sees them: shapes are read from the
// buffers, and checked. The blocks are those of grouped products.
#include <algorithm>
#include <string>
#include <vector>

#include "grouped.h"
#include "isa.h"
#include "numbers_buffers.h"
#include "pages.h"
#include "parallel.h"
#include "several.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using capibara::GroupedBlock;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara products: ") + why);
}

struct Matrix {
  int64_t rows, columns;
  float* at;
};

template <class Buffer>
bool read(Buffer x, Matrix* to) {
  if (x.element_type() != ffi::F32 || x.dimensions().size() != 2) return false;
  *to = {x.dimensions()[0], x.dimensions()[1], static_cast<float*>(x.untyped_data())};
  return true;
}

bool read_all(const ffi::RemainingArgs& from, size_t first, size_t count, std::vector<Matrix>* to) {
  for (size_t i = first; i < first + count; ++i) {
    const auto x = from.get<ffi::AnyBuffer>(i);
    Matrix found;
    if (!x.has_value() || !read(*x, &found)) return false;
    to->push_back(found);
  }
  return true;
}

bool read_all(ffi::RemainingRets& from, std::vector<Matrix>* to) {
  for (size_t i = 0; i < from.size(); ++i) {
    auto x = from.get<ffi::AnyBuffer>(i);
    Matrix found;
    if (!x.has_value() || !read(**x, &found)) return false;
    capibara::prefer_large_pages(found.at, size_t(found.rows * found.columns) * sizeof(float));
    to->push_back(found);
  }
  return true;
}

// What a thread computes at once: terms that are added to one block of a result, or blocks of several results that
// multiply the same columns of the left matrix, which are copied once.
using Item = std::vector<GroupedBlock>;

// Parts of rows of an item: the right matrix is copied once for all of them.
constexpr int64_t kParts = 4;

int64_t parts(int64_t size, int64_t most) { return std::max<int64_t>((size + most - 1) / most, 1); }

int64_t share(int64_t size, int64_t count, int64_t unit) {
  return std::max<int64_t>(((size + count - 1) / count + unit - 1) / unit * unit, unit);
}

// Cuts products with the same rows into parts of rows and of columns: as many as there are threads, or a multiple, if
// they are that large.
void cut(const Item& whole, int64_t threads, std::vector<Item>* to) {
  const auto& kernels = *capibara::isa().grouped;
  const int64_t rows = whole.front().rows;
  int64_t most = 0, fewest = INT64_MAX;
  for (const GroupedBlock& p : whole) most = std::max(most, p.columns), fewest = std::min(fewest, p.columns);
  int64_t down = parts(rows, kParts * kernels.most_rows), across = parts(most, kernels.most_columns);
  const auto high = [&] { return rows >= 4 * down * kernels.unit_rows; };
  const auto wide = [&] { return fewest >= 4 * across * kernels.unit_columns; };
  // The longer side is cut, as what a part copies of its operands grows with its sides.
  while (down * across % threads != 0 && down * across < 4 * threads) {
    if (high() && (rows * across > most * down || !wide()))
      ++down;
    else if (wide())
      ++across;
    else
      break;
  }
  const int64_t height = share(rows, down, kernels.unit_rows);
  for (int64_t part = 0; part < across; ++part)
    for (int64_t i = 0; i < rows; i += height) {
      Item item;
      for (const GroupedBlock& p : whole) {
        const int64_t width = share(p.columns, across, kernels.unit_columns), j = part * width;
        if (j >= p.columns) continue;
        GroupedBlock block = p;
        block.rows = std::min(height, rows - i), block.columns = std::min(width, p.columns - j);
        block.a += p.a_by_depth ? i : i * p.a_step;
        block.skip(j);
        block.c += i * p.c_step;
        item.push_back(block);
      }
      if (!item.empty()) to->push_back(std::move(item));
    }
}

ffi::Error run(ffi::ThreadPool& pool, std::vector<Item>& items, bool beside) {
  const auto& kernels = *capibara::isa().grouped;
  for (Item& item : items)
    for (size_t i = 1; beside && i < item.size(); ++i) item[i - 1].beside = &item[i];
  const auto work = [&](int64_t number, float* scratch) {
    for (const GroupedBlock& block : items[number]) {
      kernels.multiply(block, scratch);
      if (beside) break;
    }
  };
  if (!capibara::Crew::run(pool, static_cast<int64_t>(items.size()), kernels.scratch, work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara products: out of memory");
  return ffi::Error::Success();
}

int64_t threads_of(ffi::ThreadPool& pool) { return std::max<int64_t>(pool.num_threads(), 1); }

// x [rows, inner], matrices [inner, columns], which may be bfloat16 and lie in panels; of each x @ matrix.
ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices, ffi::RemainingRets results) {
  Matrix rows;
  std::vector<Matrix> out;
  if (!read(x, &rows) || !read_all(results, &out) || matrices.size() != out.size())
    return refuse("the arrays must be float32 with two axes, and as many results as matrices");
  std::vector<Item> items;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto right = matrices.get<ffi::AnyBuffer>(i);
    capibara::MatrixOf matrix;
    if (!right.has_value() || !capibara::read_matrix(*right, &matrix))
      return refuse("the matrices must be float32 or bfloat16 with two axes, or lie in panels");
    const int64_t columns = matrix.columns;
    if (matrix.rows != rows.columns || out[i].rows != rows.rows || out[i].columns != columns)
      return refuse("the arrays' shapes do not fit together");
    if (out[i].rows == 0 || columns == 0) continue;
    GroupedBlock whole{rows.rows,      columns, rows.columns, rows.at, rows.columns, false,
                       matrix.numbers, columns, false,        out[i].at, columns};
    if (matrix.panels) whole.b_panel = matrix.rows * capibara::kPanelColumns;
    cut({whole}, threads_of(pool), &items);
  }
  return run(pool, items, false);
}

// Slopes [rows, columns] and matrices [inner, columns], one after the other; the sum of slope @ matrix.T.
ffi::Error of_rows(ffi::ThreadPool pool, ffi::RemainingArgs arrays, ffi::Result<ffi::AnyBuffer> result) {
  std::vector<Matrix> slopes, right;
  Matrix out;
  const size_t count = arrays.size() / 2;
  if (count == 0 || arrays.size() != 2 * count || !read_all(arrays, 0, count, &slopes) ||
      !read_all(arrays, count, count, &right) || !read(*result, &out))
    return refuse("the arrays must be float32 with two axes, and as many slopes as matrices");
  capibara::prefer_large_pages(out.at, result->size_bytes());
  Item sum;
  for (size_t i = 0; i < count; ++i) {
    if (slopes[i].rows != out.rows || right[i].rows != out.columns || right[i].columns != slopes[i].columns)
      return refuse("the arrays' shapes do not fit together");
    sum.push_back({out.rows, out.columns, slopes[i].columns, slopes[i].at, slopes[i].columns, false, right[i].at,
                   right[i].columns, true, out.at, out.columns});
    sum.back().add = i > 0;
  }
  std::vector<Item> items;
  if (out.rows > 0 && out.columns > 0) cut(sum, threads_of(pool), &items);
  return run(pool, items, false);
}

// Sums over many rows, whose results are small: each thread has its own rows, reads them as a whole and copies them once.
// The sums of the pieces are added in their order.
constexpr int64_t kPiece = 1024;      // rows of a piece, at least
constexpr int64_t kSmall = 1 << 19;   // numbers of the results
constexpr int64_t kAdded = 1 << 14;   // numbers that are added at a time

ffi::Error by_depth(ffi::ThreadPool& pool, const Item& whole, int64_t pieces) {
  int64_t numbers = 0;
  for (const GroupedBlock& p : whole) numbers += p.rows * p.columns;
  float* sums = nullptr;
  capibara::Room room;
  room.add(&sums, numbers * (pieces - 1));
  if (!room.take()) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara products: out of memory");
  const auto& kernels = *capibara::isa().grouped;
  const int64_t depth = whole.front().depth, deep = (depth + pieces - 1) / pieces;
  std::vector<Item> items;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    Item item;
    float* at = sums + numbers * (piece - 1);
    const int64_t first = piece * deep;
    for (GroupedBlock block : whole) {
      block.depth = std::min(deep, depth - first);
      block.a += first * block.a_step, block.b += first * block.b_step;
      if (piece > 0) block.c = at, block.c_step = block.columns, at += block.rows * block.columns;
      // What is wider than a block is several of them, side by side.
      const int64_t width = share(block.columns, parts(block.columns, kernels.most_columns), kernels.unit_columns);
      for (int64_t j = 0, columns = block.columns; j < columns; j += width, block.b += width, block.c += width) {
        block.columns = std::min(width, columns - j);
        item.push_back(block);
      }
    }
    items.push_back(std::move(item));
  }
  if (const ffi::Error bad = run(pool, items, true); bad.failure()) return bad;
  struct Part {
    float* to;
    const float* from;  // of the second piece
    int64_t count;
  };
  std::vector<Part> added;
  const float* from = sums;
  for (const GroupedBlock& p : whole)
    for (int64_t i = 0, all = p.rows * p.columns; i < all; i += kAdded) {
      added.push_back({p.c + i, from, std::min(kAdded, all - i)});
      from += added.back().count;
    }
  const auto add = [&](int64_t item, float*) {
    const Part& part = added[item];
    for (int64_t piece = 0; piece < pieces - 1; ++piece)
      for (int64_t i = 0; i < part.count; ++i) part.to[i] += part.from[numbers * piece + i];
  };
  if (!capibara::Crew::run(pool, static_cast<int64_t>(added.size()), 16, add))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara products: out of memory");
  return ffi::Error::Success();
}

// x [rows, inner], slopes [rows, columns]; of each x.T @ slope.
ffi::Error of_matrices(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs slopes, ffi::RemainingRets results) {
  Matrix rows;
  std::vector<Matrix> right, out;
  if (!read(x, &rows) || !read_all(slopes, 0, slopes.size(), &right) || !read_all(results, &out) ||
      right.size() != out.size())
    return refuse("the arrays must be float32 with two axes, and as many results as slopes");
  Item whole;
  for (size_t i = 0; i < right.size(); ++i) {
    if (right[i].rows != rows.rows || out[i].rows != rows.columns || out[i].columns != right[i].columns)
      return refuse("the arrays' shapes do not fit together");
    if (out[i].rows == 0 || out[i].columns == 0) continue;
    whole.push_back({rows.columns, right[i].columns, rows.rows, rows.at, rows.columns, true, right[i].at,
                     right[i].columns, false, out[i].at, out[i].columns});
  }
  std::vector<Item> items;
  if (whole.empty()) return ffi::Error::Success();
  int64_t numbers = 0;
  for (const GroupedBlock& p : whole) numbers += p.rows * p.columns;
  const int64_t pieces = std::min(threads_of(pool), rows.rows / kPiece);
  if (pieces > 1 && numbers <= kSmall) return by_depth(pool, whole, pieces);
  cut(whole, threads_of(pool), &items);
  return run(pool, items, true);
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_products(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_products_of_rows(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_products_of_matrices(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    capibara_products, forward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_products_of_rows, of_rows,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    capibara_products_of_matrices, of_matrices,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets());
