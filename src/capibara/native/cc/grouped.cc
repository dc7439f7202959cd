// Grouped products as XLA sees them: shapes are read from the buffers, and checked; sizes of groups are data.
#include "grouped.h"

#include <algorithm>
#include <string>
#include <vector>

#include "isa.h"
#include "pages.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;
using capibara::GroupedBlock;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara grouped product: ") + why);
}

bool is_float(const ffi::AnyBuffer& x, size_t rank) {
  return x.element_type() == ffi::F32 && x.dimensions().size() == rank;
}

// The first row of each group, and at last the row after the last group. A negative size counts as 0.
bool bounds(const ffi::AnyBuffer& sizes, int64_t rows, std::vector<int64_t>* starts) {
  if (sizes.dimensions().size() != 1 || sizes.element_type() != ffi::S32) return false;
  const auto* size = static_cast<const int32_t*>(sizes.untyped_data());
  const int64_t groups = sizes.dimensions()[0];
  starts->assign(1, 0);
  for (int64_t g = 0; g < groups; ++g)
    starts->push_back(std::min<int64_t>(starts->back() + std::max<int32_t>(size[g], 0), rows));
  return true;
}

constexpr int64_t kRun = 1 << 22;  // products of numbers in a run of blocks: some 30 microseconds

// Shares of about the same size, each but the last one whole units.
int64_t even(int64_t size, int64_t most, int64_t unit) {
  const int64_t shares = std::max<int64_t>((size + most - 1) / most, 1), share = (size + shares - 1) / shares;
  return std::max((share + unit - 1) / unit * unit, unit);
}

// Computes products, cut into blocks that threads take one after the other.
ffi::Error multiply(ffi::ThreadPool& pool, const std::vector<GroupedBlock>& products) {
  const auto& kernels = *capibara::isa().grouped;
  int64_t rows = kernels.most_rows, columns = kernels.most_columns;
  std::vector<GroupedBlock> blocks;
  const auto cut = [&] {
    blocks.clear();
    for (const GroupedBlock& whole : products) {
      const int64_t height = even(whole.rows, rows, kernels.unit_rows);
      const int64_t width = even(whole.columns, columns, kernels.unit_columns);
      for (int64_t j = 0; j < whole.columns; j += width)
        for (int64_t i = 0; i < whole.rows; i += height) {
          GroupedBlock block = whole;
          block.rows = std::min(height, whole.rows - i), block.columns = std::min(width, whole.columns - j);
          if (whole.depth > 0) {
            block.a += whole.a_by_depth ? i : i * whole.a_step;
            block.b += whole.b_by_column ? j * whole.b_step : j;
          }
          block.c += i * whole.c_step + j;
          blocks.push_back(block);
        }
    }
  };
  // Small products in more blocks than threads, so that these end together.
  const auto enough = static_cast<size_t>(4 * std::max<int64_t>(pool.num_threads(), 1));
  for (cut(); blocks.size() < enough; cut()) {
    if (columns > 2 * kernels.unit_columns)
      columns /= 2;
    else if (rows > 4 * kernels.unit_rows)
      rows /= 2;
    else
      break;
  }
  // Threads take small blocks in runs, and fetch the next one of a run ahead.
  int64_t all = 0, done = 0;
  const auto operations = [](const GroupedBlock& b) { return b.rows * b.columns * (b.depth + 1); };
  for (const GroupedBlock& block : blocks) all += operations(block);
  const int64_t most = std::min(kRun, all / static_cast<int64_t>(enough));
  std::vector<size_t> runs{0};
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (done > 0 && done + operations(blocks[i]) > most) runs.push_back(i), done = 0;
    done += operations(blocks[i]);
    blocks[i].next = nullptr;
    if (i > runs.back()) blocks[i - 1].next = &blocks[i];
  }
  runs.push_back(blocks.size());
  const auto work = [&](int64_t item, float* scratch) {
    for (size_t i = runs[item]; i < runs[item + 1]; ++i) kernels.multiply(blocks[i], scratch);
  };
  if (!capibara::Crew::run(pool, static_cast<int64_t>(runs.size()) - 1, kernels.scratch, work))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara grouped product: out of memory");
  return ffi::Error::Success();
}

// lhs [rows, inner], rhs [groups, inner, columns] or, transposed, [groups, columns, inner]; out [rows, columns].
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer sizes,
                   ffi::Result<ffi::AnyBuffer> out, int64_t transposed) {
  std::vector<int64_t> starts;
  if (!is_float(lhs, 2) || !is_float(rhs, 3) || !is_float(*out, 2) || !bounds(sizes, lhs.dimensions()[0], &starts))
    return refuse("the arrays' types do not fit");
  const int64_t rows = lhs.dimensions()[0], inner = lhs.dimensions()[1], columns = out->dimensions()[1];
  const int64_t groups = rhs.dimensions()[0];
  if (out->dimensions()[0] != rows || sizes.dimensions()[0] != groups ||
      rhs.dimensions()[1] != (transposed ? columns : inner) || rhs.dimensions()[2] != (transposed ? inner : columns))
    return refuse("the arrays' shapes do not fit together");
  const auto* a = static_cast<const float*>(lhs.untyped_data());
  const auto* b = static_cast<const float*>(rhs.untyped_data());
  auto* c = static_cast<float*>(out->untyped_data());
  capibara::prefer_large_pages(c, out->size_bytes());
  std::vector<GroupedBlock> products;
  const int64_t step = transposed ? inner : columns;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = starts[g], size = starts[g + 1] - start;
    products.push_back({size, columns, inner, a + start * inner, inner, false, b + g * inner * columns, step,
                        transposed != 0, c + start * columns, columns});
  }
  const int64_t end = starts.back();
  products.push_back({rows - end, columns, 0, nullptr, 0, false, nullptr, 0, false, c + end * columns, columns});
  return multiply(pool, products);
}

// left [rows, inner], right [rows, columns]; out [groups, inner, columns].
ffi::Error outer(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer sizes,
                 ffi::Result<ffi::AnyBuffer> out) {
  std::vector<int64_t> starts;
  if (!is_float(left, 2) || !is_float(right, 2) || !is_float(*out, 3) ||
      !bounds(sizes, left.dimensions()[0], &starts))
    return refuse("the arrays' types do not fit");
  const int64_t rows = left.dimensions()[0], inner = left.dimensions()[1], columns = right.dimensions()[1];
  const int64_t groups = sizes.dimensions()[0];
  if (right.dimensions()[0] != rows || out->dimensions()[0] != groups || out->dimensions()[1] != inner ||
      out->dimensions()[2] != columns)
    return refuse("the arrays' shapes do not fit together");
  const auto* a = static_cast<const float*>(left.untyped_data());
  const auto* b = static_cast<const float*>(right.untyped_data());
  auto* c = static_cast<float*>(out->untyped_data());
  capibara::prefer_large_pages(c, out->size_bytes());
  std::vector<GroupedBlock> products;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = starts[g], size = starts[g + 1] - start;
    products.push_back({inner, columns, size, a + start * inner, inner, true, b + start * columns, columns, false,
                        c + g * inner * columns, columns});
  }
  return multiply(pool, products);
}

}  // namespace

#define CAPIBARA_EXPORT __attribute__((visibility("default")))

extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_grouped_product(XLA_FFI_CallFrame* frame);
extern "C" CAPIBARA_EXPORT XLA_FFI_Error* capibara_grouped_outer(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_grouped_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_grouped_outer, outer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
