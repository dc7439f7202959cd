// Sharing items of work out over XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

#include "xla/ffi/api/ffi.h"

namespace capibara {

// A moment of waiting for another thread.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Runs work(item, scratch) for every item, each with `floats` floats of scratch that no other thread uses.
//
// The calling thread may itself be one of the pool's, so it must not wait for a task to *start*: it takes items
// like the others, and at the end waits only for items that a running thread has in hand. A task that starts
// after the last item was taken finds nothing to do.
class Crew {
 public:
  Crew(int64_t items, int64_t floats, std::function<void(int64_t, float*)> work)
      : items_(items), floats_(floats), work_(std::move(work)) {}

  // False when memory ran out.
  static bool run(::xla::ffi::ThreadPool& pool, int64_t items, int64_t floats,
                  std::function<void(int64_t, float*)> work) {
    if (items == 0) return true;
    auto crew = std::make_shared<Crew>(items, floats, std::move(work));
    const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([crew] { crew->take(); });
    crew->take();
    // What others have in hand mostly ends within microseconds, and waking this thread would take longer.
    for (int i = 0; i < kPatience && crew->busy_.load(std::memory_order_acquire) != 0; ++i) rest();
    std::unique_lock<std::mutex> lock(crew->mutex_);
    crew->idle_.wait(lock, [&] { return crew->busy_.load() == 0; });
    return !crew->out_of_memory_;
  }

 private:
  static constexpr int kPatience = 1000;  // some 20 microseconds

  void take() {
    {
      // Counted before an item is taken, so that the caller cannot leave while one is in hand.
      std::lock_guard<std::mutex> lock(mutex_);
      if (next_.load() >= items_) return;
      ++busy_;
    }
    const size_t bytes = (static_cast<size_t>(floats_) * sizeof(float) + 63) / 64 * 64;
    float* scratch = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (scratch != nullptr) {
      for (int64_t item; (item = next_.fetch_add(1)) < items_;) work_(item, scratch);
      std::free(scratch);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    // A helper without memory leaves its share to the others; the last one without any is an error.
    if (--busy_ == 0) {
      out_of_memory_ |= next_.load() < items_;
      next_.store(items_);  // a task that starts after this finds nothing: what it would read may be gone
      idle_.notify_all();
    }
  }

  const int64_t items_, floats_;
  const std::function<void(int64_t, float*)> work_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
  std::atomic<int64_t> busy_{0};  // changed under the mutex
  bool out_of_memory_ = false;
};

}  // namespace capibara
