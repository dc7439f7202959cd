// Products of the same rows with several matrices, and their gradients, as XLA sees them: shapes are read from the
// buffers, and checked. The blocks are those of grouped products.
#include <algorithm>
#include <string>
#include <vector>

#include "grouped.h"
#include "isa.h"
#include "pages.h"
#include "parallel.h"
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

// Terms of one result, which are added in their order: all have its rows, columns and place.
using Sum = std::vector<GroupedBlock>;

int64_t parts(int64_t size, int64_t most) { return std::max<int64_t>((size + most - 1) / most, 1); }

int64_t share(int64_t size, int64_t count, int64_t unit) {
  return std::max<int64_t>(((size + count - 1) / count + unit - 1) / unit * unit, unit);
}

// Cuts a sum into blocks of its result: `fewest` or more, if it is that large.
void cut(const Sum& whole, int64_t fewest, std::vector<Sum>* to) {
  const auto& kernels = *capibara::isa().grouped;
  const GroupedBlock& first = whole.front();
  int64_t down = parts(first.rows, kernels.most_rows), across = parts(first.columns, kernels.most_columns);
  const auto wide = [&](int64_t count) { return first.columns >= 4 * count * kernels.unit_columns; };
  const auto high = [&](int64_t count) { return first.rows >= 4 * count * kernels.unit_rows; };
  // The longer side is cut, as what a block copies of its operands grows with its sides.
  while (down * across % fewest != 0 && down * across < 4 * fewest) {
    const bool rows_longer = first.rows * across > first.columns * down;
    if (rows_longer && high(down))
      ++down;
    else if (wide(across))
      ++across;
    else if (high(down))
      ++down;
    else
      break;
  }
  const int64_t height = share(first.rows, down, kernels.unit_rows);
  const int64_t width = share(first.columns, across, kernels.unit_columns);
  for (int64_t j = 0; j < first.columns; j += width)
    for (int64_t i = 0; i < first.rows; i += height) {
      Sum block = whole;
      for (GroupedBlock& term : block) {
        term.rows = std::min(height, first.rows - i), term.columns = std::min(width, first.columns - j);
        term.a += term.a_by_depth ? i : i * term.a_step;
        term.b += term.b_by_column ? j * term.b_step : j;
        term.c += i * term.c_step + j;
      }
      to->push_back(std::move(block));
    }
}

ffi::Error run(ffi::ThreadPool& pool, const std::vector<Sum>& blocks) {
  const auto& kernels = *capibara::isa().grouped;
  const auto work = [&](int64_t item, float* scratch) {
    for (const GroupedBlock& term : blocks[item]) kernels.multiply(term, scratch);
  };
  if (!capibara::Crew::run(pool, static_cast<int64_t>(blocks.size()), kernels.scratch, work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara products: out of memory");
  return ffi::Error::Success();
}

int64_t threads_of(ffi::ThreadPool& pool) { return std::max<int64_t>(pool.num_threads(), 1); }

// x [rows, inner], matrices [inner, columns]; of each x @ matrix.
ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices, ffi::RemainingRets results) {
  Matrix rows;
  std::vector<Matrix> right, out;
  if (!read(x, &rows) || !read_all(matrices, 0, matrices.size(), &right) || !read_all(results, &out) ||
      right.size() != out.size())
    return refuse("the arrays must be float32 with two axes, and as many results as matrices");
  std::vector<Sum> blocks;
  for (size_t i = 0; i < right.size(); ++i) {
    if (right[i].rows != rows.columns || out[i].rows != rows.rows || out[i].columns != right[i].columns)
      return refuse("the arrays' shapes do not fit together");
    if (out[i].rows == 0 || out[i].columns == 0) continue;
    cut({{rows.rows, right[i].columns, rows.columns, rows.at, rows.columns, false, right[i].at, right[i].columns, false,
          out[i].at, out[i].columns}},
        threads_of(pool), &blocks);
  }
  return run(pool, blocks);
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
  Sum sum;
  for (size_t i = 0; i < count; ++i) {
    if (slopes[i].rows != out.rows || right[i].rows != out.columns || right[i].columns != slopes[i].columns)
      return refuse("the arrays' shapes do not fit together");
    sum.push_back({out.rows, out.columns, slopes[i].columns, slopes[i].at, slopes[i].columns, false, right[i].at,
                   right[i].columns, true, out.at, out.columns});
    sum.back().add = i > 0;
  }
  std::vector<Sum> blocks;
  if (out.rows > 0 && out.columns > 0) cut(sum, threads_of(pool), &blocks);
  return run(pool, blocks);
}

// x [rows, inner], slopes [rows, columns]; of each x.T @ slope.
ffi::Error of_matrices(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs slopes, ffi::RemainingRets results) {
  Matrix rows;
  std::vector<Matrix> right, out;
  if (!read(x, &rows) || !read_all(slopes, 0, slopes.size(), &right) || !read_all(results, &out) ||
      right.size() != out.size())
    return refuse("the arrays must be float32 with two axes, and as many results as slopes");
  std::vector<Sum> blocks;
  for (size_t i = 0; i < right.size(); ++i) {
    if (right[i].rows != rows.rows || out[i].rows != rows.columns || out[i].columns != right[i].columns)
      return refuse("the arrays' shapes do not fit together");
    if (out[i].rows == 0 || out[i].columns == 0) continue;
    cut({{rows.columns, right[i].columns, rows.rows, rows.at, rows.columns, true, right[i].at, right[i].columns, false,
          out[i].at, out[i].columns}},
        threads_of(pool), &blocks);
  }
  return run(pool, blocks);
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
