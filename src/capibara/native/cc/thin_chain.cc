// Products of a few rows, and what lies between them, as one call: products with weights are too short for a call each.
//
// The work is cut into items in the order of its stages, and threads take them in that order. Who has an item of a stage
// that waits for others brings what the item will read nearer meanwhile, so that memory, which is what decoding a few
// texts waits for, is read without pauses.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "codes_buffers.h"
#include "isa.h"
#include "numbers_buffers.h"
#include "parallel.h"
#include "quantised.h"
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
  kProduct,  // of rows with a matrix; whether one of two axes is transposed
  kAdd,
  kGate,  // a * logistic(a) * b
  kNorm,  // of rows, by a scale for each column; the bits of epsilon
  kCodes,  // product of rows with a matrix in codes; which matrix
};
constexpr size_t kNumbers = 4;
// What is said of a matrix in codes: the arrays of its scales, levels and table, the length of its rows and of their
// groups, and whether the product is across.
constexpr size_t kMatrixNumbers = 6;

// A product with a matrix of numbers, or of codes.
class Product {
 public:
  virtual ~Product() = default;
  virtual int64_t items() const = 0;
  virtual int64_t scratch() const = 0;
  virtual void reserve(capibara::Room& room) = 0;
  virtual void multiply(int64_t item, float* scratch) const = 0;
  virtual void finish(int64_t row, int64_t first, int64_t count) const = 0;
  virtual bool fetch(int64_t item, int64_t part) const = 0;
};

template <class Described, class Kernels>
class ProductOf final : public Product {
 public:
  ProductOf(const Described& product, const Kernels& kernels) : p_(product), kernels_(kernels) {}
  int64_t items() const override { return kernels_.items(p_); }
  int64_t scratch() const override { return kernels_.scratch(p_); }
  void reserve(capibara::Room& room) override { room.add(&p_.room, kernels_.room(p_)); }
  void multiply(int64_t item, float* scratch) const override { kernels_.multiply(p_, item, scratch); }
  void finish(int64_t row, int64_t first, int64_t count) const override {
    kernels_.finish_columns(p_, row, first, count);
  }
  bool fetch(int64_t item, int64_t part) const override { return kernels_.fetch(p_, item, part); }

 private:
  Described p_;
  const Kernels& kernels_;
};

template <class Described, class Kernels>
std::unique_ptr<Product> product_of(const Described& product, const Kernels& kernels) {
  return std::make_unique<ProductOf<Described, Kernels>>(product, kernels);
}

struct Op {
  Kind kind;  // not kCodes
  const float *a, *b;
  float* out;
  int64_t width;
  float epsilon = 0;
  std::unique_ptr<Product> product;
};

// What can be computed at once: products, columns of other arrays, or whole rows of them.
struct Stage {
  Kind kind;  // kAdd: columns
  int64_t first = 0, wide = 0;
  std::vector<const Op*> ops;
  std::vector<int64_t> ends;  // of the items of each operation
};

class Chain {
 public:
  Chain(int64_t rows, int64_t threads) : rows_(rows), threads_(threads), kernels_(*capibara::isa().thin) {}

  // `op` must outlive this.
  void add(const Op& op) {
    if (op.kind == kProduct) {
      const auto here = [&](const Op* other) { return other->out == op.a; };
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
    stages_.back().ops.push_back(&op);
  }

  bool run(ffi::ThreadPool& pool) {
    columns();
    capibara::Room room;
    int64_t scratch = 1, items = 0;
    for (Stage& stage : stages_) {
      stage.first = items;
      if (stage.kind == kAdd) {
        int64_t most = 0;
        for (const Op* op : stage.ops) most = std::max(most, op->width);
        const int64_t even = (most + threads_ - 1) / threads_;
        stage.wide = rows_ >= threads_ ? most : std::max((even + 63) / 64 * 64, kLeastWide);
        stage.ends = {most == 0 ? 0 : rows_ * ((most + stage.wide - 1) / stage.wide)};
      } else {
        int64_t end = 0;
        for (const Op* op : stage.ops) {
          stage.ends.push_back(end += stage.kind == kProduct ? op->product->items() : rows_);
          if (stage.kind != kProduct) continue;
          op->product->reserve(room);
          scratch = std::max(scratch, op->product->scratch());
        }
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
    std::vector<const Op*> done = stages_.back().ops;
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
    const Op& op = *stage.ops[i];
    wait(stage, op, own);
    if (stage.kind == kProduct) {
      op.product->multiply(own, scratch);
    } else if (stage.kind == kNorm) {
      kernels_.norm(op.a + own * op.width, op.b, op.epsilon, op.width, op.out + own * op.width);
    } else {
      const int64_t row = own % rows_, begin = own / rows_ * stage.wide;
      for (const Op* one : stage.ops) compute(*one, row, begin, std::min(stage.wide, one->width - begin));
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  void compute(const Op& op, int64_t row, int64_t begin, int64_t count) {
    if (count <= 0) return;
    const int64_t at = row * op.width + begin;
    if (op.kind == kProduct)
      op.product->finish(row, begin, count);
    else
      (op.kind == kAdd ? kernels_.add : kernels_.gate)(op.a + at, op.b + at, count, op.out + at);
  }

  // Items are taken in order, so all that this one waits for are in the hands of running threads.
  void wait(const Stage& stage, const Op& op, int64_t own) {
    bool more = stage.kind == kProduct;
    for (int64_t n = 0; done_.load(std::memory_order_acquire) < stage.first; ++n)
      if (more)
        more = op.product->fetch(own, n);
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

// One of the matrices in codes, or what is wrong.
const char* read_matrix(capibara::CodesProduct& p, const std::vector<ffi::AnyBuffer>& arrays, int64_t codes,
                        ffi::Span<const int64_t> matrices, int64_t which) {
  const int64_t known = static_cast<int64_t>(arrays.size());
  if (which < 0 || which >= static_cast<int64_t>(matrices.size() / kMatrixNumbers)) return "there is no such matrix";
  const int64_t* const m = matrices.begin() + which * kMatrixNumbers;
  if (codes >= known) return "codes must be an argument";
  for (int i = 0; i < 3; ++i)
    if (m[i] < 0 || m[i] >= known) return "a matrix has no such array";
  p.across = m[5] != 0;
  return capibara::read_codes(p.w, arrays[codes], arrays[m[0]], arrays[m[1]], arrays[m[2]], m[3], m[4]);
}

// arrays: float32 [rows, width] or a matrix, which may be bfloat16 and lie in panels, or [width], or what a matrix in
// codes is made of;
// results: float32 [rows, width]. `ops` and `matrices` see above; `outputs` says which array each result is.
ffi::Error chain(ffi::ThreadPool pool, ffi::RemainingArgs arrays, ffi::RemainingRets results, int64_t rows,
                 ffi::Span<const int64_t> ops, ffi::Span<const int64_t> matrices, ffi::Span<const int64_t> outputs) {
  struct Value {
    capibara::Numbers at;
    int64_t rows, width;  // of a vector: 1 row; of what is no numbers: none
    bool panels = false;
    const float* floats() const { return static_cast<const float*>(at.at); }
  };
  std::vector<Value> values;
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto x = arrays.get<ffi::AnyBuffer>(i);
    if (!x.has_value() || x->dimensions().size() < 1 || x->dimensions().size() > 3)
      return refuse("the arrays must have one or two axes, matrices in panels three");
    const auto shape = x->dimensions();
    buffers.push_back(*x);
    Value value{{}, -1, -1};
    capibara::MatrixOf matrix;
    if (capibara::read_matrix(*x, &matrix))
      value = {matrix.numbers, matrix.rows, matrix.columns, matrix.panels};
    else if (shape.size() == 1 && capibara::read_numbers(*x, &value.at))
      value.rows = 1, value.width = shape[0];
    values.push_back(value);
  }
  const size_t count = ops.size() / kNumbers, given = values.size();
  if (ops.size() % kNumbers != 0 || matrices.size() % kMatrixNumbers != 0 || outputs.size() != results.size() ||
      rows < 1)
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
  std::vector<capibara::CodesProduct> coded(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const op = ops.begin() + i * kNumbers;
    const int64_t known = static_cast<int64_t>(values.size());
    if (op[1] < 0 || op[1] >= known || op[2] < 0 || op[2] >= known) return refuse("an operation has no such array");
    const Value &a = values[op[1]], &b = values[op[2]];
    int64_t width = a.width;
    if (a.rows < 0 || a.at.narrow || a.panels) return refuse("rows must be float32 with two axes");
    if (op[0] != kCodes && (b.rows < 0 || ((b.at.narrow || b.panels) && op[0] != kProduct)))
      return refuse("what is no matrix must be float32, matrices of numbers float32 or bfloat16");
    bool fits = a.rows == rows;
    if (op[0] == kProduct) {
      const bool by_column = op[3] != 0 && !b.panels;
      width = by_column ? b.rows : b.width;
      fits = fits && (by_column ? b.width : b.rows) == a.width && op[2] < static_cast<int64_t>(given);
    } else if (op[0] == kCodes) {
      const char* const why = read_matrix(coded[i], buffers, op[2], matrices, op[3]);
      if (why != nullptr) return refuse(why);
      const capibara::CodesProduct& p = coded[i];
      width = p.across ? p.w.inner : p.w.rows;
      fits = fits && a.width == (p.across ? p.w.rows : p.w.inner) && a.width > 0 && width > 0 &&
             rows <= capibara::kFewVectors;
    } else if (op[0] == kNorm) {
      fits = fits && b.rows == 1 && b.width == a.width;
    } else {
      fits = fits && (op[0] == kAdd || op[0] == kGate) && b.rows == rows && b.width == a.width;
    }
    if (!fits) return refuse("the arrays' shapes do not fit together");
    values.push_back({{}, rows, width});
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
  std::vector<Op> every(count);
  Chain all(rows, threads);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const op = ops.begin() + i * kNumbers;
    const Value &a = values[op[1]], &b = values[op[2]];
    Value& out = values[given + i];
    out.at = places[i];
    Op& one = every[i];
    one.kind = op[0] == kCodes ? kProduct : static_cast<Kind>(op[0]);
    one.a = a.floats(), one.b = b.floats(), one.out = places[i], one.width = out.width;
    if (op[0] == kNorm) {
      const int32_t bits = static_cast<int32_t>(op[3]);
      __builtin_memcpy(&one.epsilon, &bits, sizeof bits);
    } else if (op[0] == kProduct) {
      const bool by_column = op[3] != 0 && !b.panels;
      const capibara::ThinProduct p{rows, a.width,   out.width, threads,   a.floats(),
                                    b.at, by_column, b.panels,  places[i], nullptr};
      one.product = product_of(p, *capibara::isa().thin);
    } else if (op[0] == kCodes) {
      capibara::CodesProduct& p = coded[i];
      p.count = rows, p.threads = threads, p.x = a.floats(), p.out = places[i];
      one.product = product_of(p, *capibara::isa().quantised);
    }
    all.add(one);
  }
  if (!all.run(pool))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "capibara chain of few rows: out of memory");
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
                                  .Attr<ffi::Span<const int64_t>>("matrices")
                                  .Attr<ffi::Span<const int64_t>>("outputs"));
