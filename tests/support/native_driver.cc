// Runs the native kernels without XLA: problems come in on standard input, results go out on standard output.
//
// A problem is its kind (0 attention, 1 a recurrence, 2 a selective scan, 3 one's gradient, 4 and 8 max-plus products of that many bytes a
// number, 16 a tensor to code, 32 a product with a matrix in codes, 33 groups whose scale is searched, 34 a block of a grouped product, 35 a product of a few rows, 36 passes over rows, -1 the end), its sizes as int64, and its arrays. test_native_aarch64.py writes them, and
// has this run under an emulator.
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <vector>

#include "isa.h"

namespace {

void need(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "native_driver: %s\n", what);
  std::exit(1);
}

template <typename T>
std::vector<T> read(int64_t count) {
  std::vector<T> x(count);
  need(std::fread(x.data(), sizeof(T), count, stdin) == static_cast<size_t>(count), "the input ends too soon");
  return x;
}

template <typename T>
void write(const std::vector<T>& x) {
  need(std::fwrite(x.data(), sizeof(T), x.size(), stdout) == x.size(), "cannot write");
}

template <typename Work>
void each(int64_t items, int64_t floats, Work work) {
  const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
  float* scratch = static_cast<float*>(std::aligned_alloc(64, bytes));
  need(scratch != nullptr, "no memory");
  for (int64_t item = items; item-- > 0;) work(item, scratch);
  std::free(scratch);
}

template <typename T>
void max_plus() {
  const auto n = read<int64_t>(5);
  capibara::Tropical p{};
  p.batch = n[0], p.rows = n[1], p.depth = n[2], p.columns = n[3], p.threads = 3;
  const auto a = read<T>(p.batch * p.rows * p.depth), b = read<T>(p.batch * p.depth * p.columns);
  std::vector<T> out(p.batch * p.rows * p.columns);
  std::vector<int32_t> index(n[4] ? out.size() : 0);
  int32_t some_negative = 0;
  p.a = a.data(), p.b = b.data(), p.out = out.data(), p.some_negative = &some_negative;
  p.index = n[4] ? index.data() : nullptr;
  const auto& kernels = *capibara::isa().tropical;
  const auto work = sizeof(T) == 4 ? kernels.float32 : kernels.float64;
  each(kernels.items(p), kernels.scratch(p, sizeof(T)), [&](int64_t item, float* s) { work(p, item, s); });
  write(out);
  write(index);
}

capibara::Steps steps(int64_t heads, int64_t length, int64_t dim, bool heads_first) {
  return {heads * length * dim, heads_first ? length * dim : dim, heads_first ? dim : heads * dim};
}

void attention() {
  const auto n = read<int64_t>(13);
  const auto scale = read<float>(2);
  capibara::Attention a{};
  a.batch = n[0], a.heads = n[1], a.kv_heads = n[2], a.q_len = n[3], a.kv_len = n[4], a.dim = n[5], a.value_dim = n[6];
  a.left = n[7], a.right = n[8], a.scale = scale[0], a.threads = 3;
  a.softcap = scale[1], a.narrow = n[12];
  const bool heads_first = n[9];
  a.query_steps = steps(a.heads, a.q_len, a.dim, heads_first);
  a.key_steps = steps(a.kv_heads, a.kv_len, a.dim, heads_first);
  a.value_steps = steps(a.kv_heads, a.kv_len, a.value_dim, heads_first);
  a.out_steps = steps(a.heads, a.q_len, a.value_dim, heads_first);
  const size_t bytes = a.narrow ? 2 : 4;
  const auto query = read<char>(a.batch * a.query_steps.batch * bytes),
             key = read<char>(a.batch * a.key_steps.batch * bytes),
             value = read<char>(a.batch * a.value_steps.batch * bytes),
             grad = read<char>(a.batch * a.out_steps.batch * bytes);
  // A bias of [batch, heads, q_len, kv_len], and segments.
  const auto bias = read<float>(n[10] ? a.batch * a.heads * a.q_len * a.kv_len : 0);
  const auto query_ids = read<int32_t>(n[11] ? a.batch * a.q_len : 0),
             key_ids = read<int32_t>(n[11] ? a.batch * a.kv_len : 0);
  a.bias.inner = a.batch;
  if (n[10]) {
    a.bias = {bias.data(), a.batch, 0, a.heads * a.q_len * a.kv_len, a.q_len * a.kv_len, a.kv_len, 1};
  }
  if (n[11]) a.query_ids = query_ids.data(), a.key_ids = key_ids.data();
  std::vector<char> out(grad.size()), query_grad(query.size()), key_grad(key.size()), value_grad(value.size());
  std::vector<float> stat(a.batch * a.heads * a.q_len), bias_grad(bias.size());
  a.query = query.data(), a.key = key.data(), a.value = value.data(), a.out = out.data(), a.stat = stat.data();
  const auto& kernels = *capibara::isa().attention;
  each(kernels.forward_items(a), kernels.forward_scratch(a), [&](int64_t i, float* s) { kernels.forward(a, i, s); });
  a.out_grad = grad.data(), a.query_grad = query_grad.data(), a.key_grad = key_grad.data();
  a.value_grad = value_grad.data();
  each(kernels.backward_items(a), kernels.backward_scratch(a), [&](int64_t i, float* s) { kernels.backward(a, i, s); });
  a.bias_grad = bias_grad.data();
  if (n[10]) each(kernels.bias_items(a), kernels.bias_scratch(a), [&](int64_t i, float* s) { kernels.bias(a, i, s); });
  write(out);
  write(query_grad);
  write(key_grad);
  write(value_grad);
  write(bias_grad);
}

void recurrence() {
  const auto n = read<int64_t>(4);
  capibara::Recurrence r{};
  r.steps = n[0], r.width = r.a_step = n[1], r.reverse = n[2], r.late = n[3], r.threads = 3;
  const auto a = read<float>(r.steps * r.width), x = read<float>(r.steps * r.width), first = read<float>(r.width);
  std::vector<float> out(x.size()), last(first.size());
  r.a = a.data(), r.x = x.data(), r.first = first.data(), r.out = out.data(), r.last = last.data();
  const auto& kernels = *capibara::isa().scan;
  each(kernels.recurrence_items(r), kernels.recurrence_scratch(r),
       [&](int64_t i, float* s) { kernels.recurrence(r, i, s); });
  write(out);
  write(last);
}

void selective_scan() {
  const auto n = read<int64_t>(6);
  capibara::SelectiveScan s{};
  s.outer = 1, s.batch = n[0], s.length = n[1], s.heads = n[2], s.width = n[3], s.groups = n[4], s.states = n[5];
  const int64_t places = s.batch * s.length;
  const auto x = read<float>(places * s.heads * s.width), dt = read<float>(places * s.heads), a = read<float>(s.heads),
             b = read<float>(places * s.groups * s.states), c = read<float>(places * s.groups * s.states),
             first = read<float>(s.batch * s.heads * s.width * s.states);
  std::vector<float> y(x.size()), last(first.size());
  s.x = x.data(), s.dt = dt.data(), s.a = a.data(), s.b = b.data(), s.c = c.data(), s.first = first.data();
  s.y = y.data(), s.last = last.data();
  const auto& kernels = *capibara::isa().scan;
  each(kernels.selective_items(s), kernels.selective_scratch(s),
       [&](int64_t i, float* f) { kernels.selective(s, i, f); });
  write(y);
  write(last);
}

void selective_gradient() {
  const auto n = read<int64_t>(7);
  capibara::SelectiveGradient s{};
  s.outer = 1, s.batch = n[0], s.length = n[1], s.heads = n[2], s.width = n[3], s.groups = n[4], s.states = n[5];
  s.parts = n[6];
  const int64_t places = s.batch * s.length, ends = s.batch * s.heads * s.width * s.states;
  const auto x = read<float>(places * s.heads * s.width), dt = read<float>(places * s.heads), a = read<float>(s.heads),
             b = read<float>(places * s.groups * s.states), c = read<float>(places * s.groups * s.states),
             first = read<float>(ends), y_grad = read<float>(places * s.heads * s.width), last_grad = read<float>(ends);
  std::vector<float> x_grad(x.size()), dt_grad(dt.size()), a_grad(s.batch * s.heads), first_grad(first.size());
  // The gradients of b and c, of the first heads and of the others.
  std::vector<float> b_grad(b.size()), c_grad(c.size()), partial(2 * b.size() * (s.parts - 1));
  s.x = x.data(), s.dt = dt.data(), s.a = a.data(), s.b = b.data(), s.c = c.data(), s.first = first.data();
  s.y_grad = y_grad.data(), s.last_grad = last_grad.data();
  s.x_grad = x_grad.data(), s.dt_grad = dt_grad.data(), s.a_grad = a_grad.data(), s.b_grad = b_grad.data();
  s.c_grad = c_grad.data(), s.first_grad = first_grad.data(), s.partial = partial.data();
  const auto& kernels = *capibara::isa().scan;
  each(kernels.gradient_items(s), kernels.gradient_scratch(s), [&](int64_t i, float* f) { kernels.gradient(s, i, f); });
  for (const auto* grad : {&x_grad, &dt_grad, &a_grad, &first_grad, &b_grad, &c_grad, &partial}) write(*grad);
}

// The coded tensor, after its size, and the tensor that it decodes to.
void codec() {
  const auto n = read<int64_t>(6);
  const capibara::Form form{int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3])};
  const int64_t rows = n[4], length = n[5];
  const auto bits = read<uint64_t>((rows * length * form.bits / 8 + 7) / 8);
  std::vector<uint8_t> coded(bits.size() * 8), back(bits.size() * 8);
  const int64_t size = capibara::encode_tensor(form, bits.data(), rows, length, 1, coded.data(), int64_t(coded.size()));
  need(size > 0, "nothing was coded");
  coded.resize(size_t(size));
  // Past the caches numbers go where the place allows it: the first time to one that may not, then to one that does.
  std::vector<uint8_t> room(back.size() + 63);
  uint8_t* const even = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
  for (const bool past : {false, true})
    for (uint8_t* out : {back.data(), even}) {
      need(capibara::decode_tensor(form, coded.data(), size, rows, length, 1, out, past) == 0, "does not decode");
      need(out == back.data() || std::memcmp(out, back.data(), size_t(rows * length * form.bits / 8)) == 0,
           "decodes to something else at another place");
    }
  write(std::vector<int64_t>{size});
  write(coded);
  write(back);
}

// Vectors [count, inner] (across: [count, rows]) times codes of four bits or eight, whose scales are floats.
void codes_product() {
  const auto n = read<int64_t>(6);
  capibara::CodesProduct p{};
  p.w.four = n[0], p.across = n[1], p.count = n[2], p.w.rows = n[3], p.w.inner = n[4], p.w.group = n[5], p.threads = 3;
  p.w.width = p.w.four ? (p.w.inner + 1) / 2 : p.w.inner, p.w.groups = (p.w.inner + p.w.group - 1) / p.w.group;
  const auto x = read<float>(p.count * (p.across ? p.w.rows : p.w.inner)), scales = read<float>(p.w.rows * p.w.groups),
             levels = read<float>(16);
  const auto codes = read<uint8_t>(p.w.rows * p.w.width);
  std::vector<float> out(p.count * (p.across ? p.w.inner : p.w.rows)), numbers(p.w.rows * p.w.inner);
  p.x = x.data(), p.w.scales = scales.data(), p.w.levels = levels.data(), p.w.codes = codes.data(), p.out = out.data();
  const auto& kernels = *capibara::isa().quantised;
  each(1, kernels.room(p) + 1, [&](int64_t, float* room) {
    p.room = room;
    each(kernels.pack_items(p), 1, [&](int64_t i, float*) { kernels.pack(p, i); });
    each(kernels.items(p), kernels.scratch(p), [&](int64_t i, float* s) { kernels.multiply(p, i, s); });
    if (const int64_t block = kernels.block(p))
      each(kernels.items(p) / block, 1, [&](int64_t i, float*) { kernels.finish(p, i); });
  });
  kernels.decode(p.w, 0, p.w.rows, 0, p.w.inner, 3e38f, numbers.data());
  write(out);
  write(numbers);
}

void search() {
  const auto n = read<int64_t>(11);
  capibara::FixedSearch s{};
  s.groups = n[0], s.size = n[1], s.bits = int32_t(n[2]), s.fraction = int32_t(n[3]), s.both_signs = int32_t(n[4]);
  s.low = int32_t(n[5]), s.high = int32_t(n[6]), s.last = int32_t(n[7]), s.cap = int32_t(n[8]), s.shift = int32_t(n[9]);
  const auto scales = read<double>(129);
  const auto values = read<float>(s.groups * s.size);
  const auto book = read<int32_t>(16);
  std::vector<uint8_t> chosen(s.groups);
  std::vector<int8_t> codes(values.size());
  s.values = values.data(), s.scales = scales.data(), s.largest = scales[128], s.book = n[10] ? book.data() : nullptr;
  s.chosen = chosen.data(), s.codes = codes.data();
  const auto& kernels = *capibara::isa().fixed;
  each(1, kernels.scratch(s) / int64_t(sizeof(float)) + 1, [&](int64_t, float* room) { kernels.search(s, room); });
  write(chosen);
  write(codes);
}

// A block of a product, whose operands are stored in one order or the other.
void grouped_block() {
  const auto n = read<int64_t>(5);
  capibara::GroupedBlock p{};
  p.rows = n[0], p.columns = n[1], p.depth = n[2], p.a_by_depth = n[3], p.b_by_column = n[4];
  const auto a = read<float>(p.rows * p.depth), b = read<float>(p.depth * p.columns);
  std::vector<float> c(p.rows * p.columns);
  p.a = a.data(), p.b = b.data(), p.c = c.data();
  p.a_step = p.a_by_depth ? p.rows : p.depth, p.b_step = p.b_by_column ? p.depth : p.columns, p.c_step = p.columns;
  const auto& kernels = *capibara::isa().grouped;
  need(p.rows <= kernels.most_rows && p.columns <= kernels.most_columns, "the block is too large");
  each(1, kernels.scratch, [&](int64_t, float* s) { kernels.multiply(p, s); });
  write(c);
}

// Rows [rows, inner] times a matrix, [columns, inner] if by column.
void thin_product() {
  const auto n = read<int64_t>(4);
  capibara::ThinProduct p{};
  p.rows = n[0], p.inner = n[1], p.columns = n[2], p.by_column = n[3], p.threads = 3;
  const auto x = read<float>(p.rows * p.inner), w = read<float>(p.inner * p.columns);
  std::vector<float> out(p.rows * p.columns);
  p.x = x.data(), p.w = w.data(), p.out = out.data();
  const auto& kernels = *capibara::isa().thin;
  each(1, kernels.room(p) + 1, [&](int64_t, float* room) {
    p.room = room;
    each(kernels.items(p), kernels.scratch(p) + 1, [&](int64_t i, float* s) { kernels.multiply(p, i, s); });
    if (const int64_t block = kernels.block(p))
      each(kernels.items(p) / block, 1, [&](int64_t i, float*) { kernels.finish(p, i); });
  });
  write(out);
}

// A norm of x [rows, features] and its slopes; the gate of x and y and its slopes; x turned, pairs by tables.
void passes_over_rows() {
  const auto n = read<int64_t>(3);
  const int64_t rows = n[0], features = n[1], pairs = n[2];
  const auto x = read<float>(rows * features), y = read<float>(rows * features), slope = read<float>(rows * features);
  const auto scale = read<float>(features), cos = read<float>(rows * pairs), sin = read<float>(rows * pairs);
  std::vector<float> normed(x.size()), inverse(rows), of_x(x.size()), of_scale(features), gated(x.size());
  std::vector<float> of_gate(x.size()), of_up(x.size()), turned(x.size());
  const auto& kernels = *capibara::isa().elementwise;
  kernels.rms_norm({rows, features, x.data(), scale.data(), 1, 1e-5f, normed.data(), inverse.data()});
  kernels.rms_norm_backward({rows, features, x.data(), scale.data(), inverse.data(), slope.data(), 1, of_x.data(),
                             of_scale.data()});
  kernels.gated({rows * features, x.data(), y.data(), nullptr, gated.data(), nullptr, nullptr});
  kernels.gated_backward({rows * features, x.data(), y.data(), slope.data(), nullptr, of_gate.data(), of_up.data()});
  kernels.turned({rows, 1, features, pairs, x.data(), cos.data(), sin.data(), -1, turned.data()});
  for (const auto* each : {&normed, &of_x, &of_scale, &gated, &of_gate, &of_up, &turned}) write(*each);
}

}  // namespace

int main() {
  std::fprintf(stderr, "%s\n", capibara::isa().attention->name);
  for (;;) {
    const int64_t kind = read<int64_t>(1)[0];
    if (kind == 0)
      attention();
    else if (kind == 1)
      recurrence();
    else if (kind == 2)
      selective_scan();
    else if (kind == 3)
      selective_gradient();
    else if (kind == 4)
      max_plus<float>();
    else if (kind == 8)
      max_plus<double>();
    else if (kind == 16)
      codec();
    else if (kind == 32)
      codes_product();
    else if (kind == 33)
      search();
    else if (kind == 34)
      grouped_block();
    else if (kind == 35)
      thin_product();
    else if (kind == 36)
      passes_over_rows();
    else
      return kind == -1 ? 0 : 1;
  }
}
