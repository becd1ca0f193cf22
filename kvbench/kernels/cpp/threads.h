// Work in the threads that torch computes in, which spin between steps: a parallel region of some microseconds is worth
// while. Regions are opened by torch's own OpenMP where that is GNU's, as in its Linux wheels; elsewhere one thread
// does all the work.
#pragma once

#include <atomic>
#include <cstdint>

using Body = void (*)(void*);
inline void (*open_region)(Body, void*, unsigned, unsigned) = nullptr;
inline int (*number_in_region)() = nullptr;

// Called by `kvbench.kernels.library` with functions of torch's OpenMP.
extern "C" __attribute__((used)) inline void kvbench_use_threads(decltype(open_region) open,
                                                                 decltype(number_in_region) number) {
    open_region = open, number_in_region = number;
}

// work(number) in so many threads, this one among them, each with a number from 0 on. Ends when all have; fewer may
// come, so the work is shared out by `Claims`.
template <class Work>
void in_threads(int64_t threads, Work work) {
    if (threads < 2 || !open_region) return work(0);
    open_region([](void* work) { (*static_cast<Work*>(work))(number_in_region()); }, &work, threads, 0);
}

// Items of work, each of which one thread takes.
class Claims {
  public:
    explicit Claims(int64_t count = 0) : count_(count) {}
    Claims& operator=(const Claims& other) {
        next_ = other.next_.load(), count_ = other.count_;
        return *this;
    }
    bool take(int64_t& item) { return (item = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }

  private:
    std::atomic<int64_t> next_{0};
    int64_t count_;
};
