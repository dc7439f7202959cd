// Products of a few rows, and what lies between them, as one call: products with weights are too short for a call each.
//
// The work is cut into items in the order of its stages, and threads take them in that order. Who has an item of a stage
// that waits for others brings what the item will read nearer meanwhile, so that memory, which is what decoding a few
// texts waits for, is read without pauses.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "several.h"
#include "thin.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

ffi::Error refuse(const char* why) {
  return ffi::Error::InvalidArgument(std::string("capibara chain of few rows: ") + why);
}

// An operation is four numbers: its kind, two arrays, and one more. Arrays are counted: first the arguments, then the
// result of each operation.
enum Kind : int64_t {
  kProduct,  // of rows with a matrix; transposed or not
  kAdd,
  kGate,  // a * logistic(a) * b
  kNorm,  // of rows, by a scale for each column; the bits of epsilon
};
constexpr size_t kNumbers = 4;

struct Op {
  Kind kind;
  const float *a, *b;
  float* out;
  int64_t width;
  float epsilon;
  size_t product;  // which
};

// What can be computed at once: products, columns of other arrays, or whole rows of them.
struct Stage {
  Kind kind;  // kAdd: columns
  int64_t first = 0, wide = 0;
  std::vector<Op> ops;
  std::vector<int64_t> ends;  // of the items of each operation
};

class Chain {
 public:
  Chain(int64_t rows, int64_t threads) : rows_(rows), threads_(threads), kernels_(*capibara::isa().thin) {}

  void add(const Op& op) {
    if (op.kind == kProduct) {
      const auto here = [&](const Op& other) { return other.out == op.a; };
      if (stages_.empty() || stages_.back().kind != kProduct ||
          std::any_of(stages_.back().ops.begin(), stages_.back().ops.end(), here))
        begin(kProduct);
    } else if (op.kind == kNorm) {
      begin(kNorm);
    } else if (stages_.empty() || stages_.back().kind == kNorm) {
      begin(kAdd);
    } else {
      columns();
    }
    stages_.back().ops.push_back(op);
  }

  std::vector<capibara::ThinProduct> products;

  bool run(ffi::ThreadPool& pool) {
    columns();
    capibara::Room room;
    int64_t scratch = 1, items = 0;
    for (auto& p : products) {
      room.add(&p.sums, kernels_.sums(p));
      scratch = std::max(scratch, kernels_.scratch(p));
    }
    for (Stage& stage : stages_) {
      stage.first = items;
      if (stage.kind == kAdd) {
        int64_t most = 0;
        for (const Op& op : stage.ops) most = std::max(most, op.width);
        const int64_t even = (most + threads_ - 1) / threads_;
        stage.wide = rows_ >= threads_ ? most : std::max((even + 63) / 64 * 64, kLeastWide);
        stage.ends = {most == 0 ? 0 : rows_ * ((most + stage.wide - 1) / stage.wide)};
      } else {
        int64_t end = 0;
        for (const Op& op : stage.ops)
          stage.ends.push_back(end += stage.kind == kProduct ? kernels_.items(products[op.product]) : rows_);
      }
      items += stage.ends.back();
    }
    return room.take() && capibara::Crew::run(pool, items, scratch, [this](int64_t item, float* own) {
             step(item, own);
           });
  }

 private:
  static constexpr int64_t kLeastWide = 256;
  static constexpr int kPatience = 500;  // then who else wants the core may have it

  void begin(Kind kind) {
    columns();
    stages_.push_back({kind});
  }

  // After products their sums are added, and what is computed column by column may follow at once.
  void columns() {
    if (stages_.empty() || stages_.back().kind != kProduct) return;
    std::vector<Op> done = stages_.back().ops;
    stages_.push_back({kAdd});
    stages_.back().ops = std::move(done);
  }

  void step(int64_t item, float* scratch) {
    size_t at = stages_.size() - 1;
    while (stages_[at].first > item) --at;
    const Stage& stage = stages_[at];
    item -= stage.first;
    size_t i = 0;
    while (stage.ends[i] <= item) ++i;
    const int64_t own = item - (i == 0 ? 0 : stage.ends[i - 1]);
    wait(stage, stage.ops[i], own);
    if (stage.kind == kProduct) {
      kernels_.multiply(products[stage.ops[i].product], own, scratch);
    } else if (stage.kind == kNorm) {
      const Op& op = stage.ops[i];
      kernels_.norm(op.a + own * op.width, op.b, op.epsilon, op.width, op.out + own * op.width);
    } else {
      const int64_t row = own % rows_, begin = own / rows_ * stage.wide;
      for (const Op& op : stage.ops) compute(op, row, begin, std::min(stage.wide, op.width - begin));
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  void compute(const Op& op, int64_t row, int64_t begin, int64_t count) {
    if (count <= 0) return;
    const int64_t at = row * op.width + begin;
    if (op.kind == kProduct)
      kernels_.finish_columns(products[op.product], begin, count);
    else
      (op.kind == kAdd ? kernels_.add : kernels_.gate)(op.a + at, op.b + at, count, op.out + at);
  }

  // Items are taken in order, so all that this one waits for are in the hands of running threads.
  void wait(const Stage& stage, const Op& op, int64_t own) {
    bool more = stage.kind == kProduct;
    for (int64_t n = 0; done_.load(std::memory_order_acquire) < stage.first; ++n)
      if (more)
        more = kernels_.fetch(products[op.product], own, n);
      else if (n < kPatience)
        capibara::rest();
      else
        std::this_thread::yield();
  }

  const int64_t rows_, threads_;
  const capibara::ThinKernels& kernels_;
  std::vector<Stage> stages_;
  alignas(64) std::atomic<int64_t> done_{0};
};

// arrays: float32 [rows, width] or a matrix or [width]; results: float32 [rows, width]. `ops` see above; `results` says
// which array each result is.
ffi::Error chain(ffi::ThreadPool pool, ffi::RemainingArgs arrays, ffi::RemainingRets results, int64_t rows,
                 ffi::Span<const int64_t> ops, ffi::Span<const int64_t> outputs) {
  struct Value {
    const float* data;
    int64_t rows, width;  // of a vector: 1 row
  };
  std::vector<Value> values;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto x = arrays.get<ffi::AnyBuffer>(i);
    if (!x.has_value() || x->element_type() != ffi::F32 || x->dimensions().size() < 1 || x->dimensions().size() > 2)
      return refuse("the arrays must be float32 with one or two axes");
    const auto shape = x->dimensions();
    values.push_back({static_cast<const float*>(x->untyped_data()), shape.size() == 1 ? 1 : shape[0], shape.back()});
  }
  const size_t count = ops.size() / kNumbers, given = values.size();
  if (ops.size() % kNumbers != 0 || outputs.size() != results.size() || rows < 1)
    return refuse("the operations do not fit the arrays");
  std::vector<float*> places(count, nullptr);
  for (size_t i = 0; i < results.size(); ++i) {
    auto out = results.get<ffi::AnyBuffer>(i);
    const int64_t at = outputs[i] - static_cast<int64_t>(given);
    if (!out.has_value() || (*out)->element_type() != ffi::F32 || (*out)->dimensions().size() != 2 || at < 0 ||
        at >= static_cast<int64_t>(count) || places[at] != nullptr)
      return refuse("the results do not fit the operations");
    places[at] = static_cast<float*>((*out)->untyped_data());
  }
  // First the shapes, then memory for what is no result, then pointers to it.
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const op = ops.begin() + i * kNumbers;
    const int64_t known = static_cast<int64_t>(values.size());
    if (op[1] < 0 || op[1] >= known || op[2] < 0 || op[2] >= known) return refuse("an operation has no such array");
    const Value &a = values[op[1]], &b = values[op[2]];
    int64_t width = a.width;
    bool fits = a.rows == rows;
    if (op[0] == kProduct) {
      width = op[3] != 0 ? b.rows : b.width;
      fits = fits && (op[3] != 0 ? b.width : b.rows) == a.width && op[2] < static_cast<int64_t>(given);
    } else if (op[0] == kNorm) {
      fits = fits && b.rows == 1 && b.width == a.width;
    } else {
      fits = fits && (op[0] == kAdd || op[0] == kGate) && b.rows == rows && b.width == a.width;
    }
    if (!fits) return refuse("the arrays' shapes do not fit together");
    values.push_back({nullptr, rows, width});
  }
  capibara::Room room;
  for (size_t i = 0; i < count; ++i)
    if (places[i] == nullptr) room.add(&places[i], rows * values[given + i].width);
  if (!room.take()) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara chain of few rows: out of memory");
  for (size_t i = 0; i < results.size(); ++i)
    if ((*results.get<ffi::AnyBuffer>(i))->dimensions()[0] != rows ||
        (*results.get<ffi::AnyBuffer>(i))->dimensions()[1] != values[outputs[i]].width)
      return refuse("the results' shapes do not fit the operations");
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  Chain all(rows, threads);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const op = ops.begin() + i * kNumbers;
    const Value &a = values[op[1]], &b = values[op[2]];
    Value& out = values[given + i];
    out.data = places[i];
    Op one{static_cast<Kind>(op[0]), a.data, b.data, places[i], out.width, 0, all.products.size()};
    if (one.kind == kNorm) {
      const int32_t bits = static_cast<int32_t>(op[3]);
      __builtin_memcpy(&one.epsilon, &bits, sizeof bits);
    }
    if (one.kind == kProduct)
      all.products.push_back({rows, a.width, out.width, threads, a.data, b.data, op[3] != 0, places[i], nullptr});
    all.add(one);
  }
  if (!all.run(pool)) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara chain of few rows: out of memory");
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_thin_chain(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_thin_chain, chain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("rows")
                                  .Attr<ffi::Span<const int64_t>>("ops")
                                  .Attr<ffi::Span<const int64_t>>("outputs"));
