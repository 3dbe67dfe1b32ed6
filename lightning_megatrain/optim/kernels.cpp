// The host's fused Adam and SGD steps: each byte of weight, trail, gradient and moments is read once and written once.
//
// Plain C ABI, no torch headers: loaded through ctypes. The arithmetic is that of torch.optim.AdamW(fused=True) and torch.optim.SGD on CPU,
// element by element, so the result does not depend on the vector width, on the number of threads or on how a unit is cut:
// every fused multiply-add is explicit and the compiler may contract nothing else (-ffp-contract=off).
//
// A master weight is either fp32, or a bf16 plane and a 16-bit trail whose integer sum is the fp32 pattern ("split"), or bf16 alone.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#define MT_X86 1
#endif
#define MT_INLINE inline __attribute__((always_inline))

extern "C" {
// One stretch of elements with the same hyperparameters. The scalars are computed in double by the caller and rounded once.
struct MtSegment {
  void* weight;       // fp32, or the bf16 plane
  int16_t* trail;     // split master only
  const void* grad;   // fp32 or bf16
  void* exp_avg;      // fp32 or bf16
  void* exp_avg_sq;   // fp32 or bf16
  int64_t count;      // elements
  float decay;        // AdamW: 1 - lr * weight_decay; Adam: 1
  float l2;           // Adam: weight_decay; AdamW: 0
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float minus_step_size;  // -lr / (1 - beta1^t)
  float correction2_sqrt;  // sqrt(1 - beta2^t)
  float eps;
  float clip;  // what the gradient is multiplied by, and rounded to its dtype, before anything else
};

struct MtSgdSegment {
  void* weight;
  int16_t* trail;
  const void* grad;
  void* momentum;  // fp32 or bf16; null without momentum
  int64_t count;
  float weight_decay;
  float mu;
  float one_minus_dampening;  // of a later step; the first one takes the gradient itself
  float minus_lr;
  float clip;
  int32_t first;  // 1: the momentum begins here
  int32_t nesterov;
};
}

extern "C" {
// The widest instruction set of this machine: 0 baseline, 1 AVX2 with FMA, 2 AVX-512.
int mt_widest(void) {
#ifdef MT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("fma"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}
}

namespace {

MT_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
MT_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct F32 {
  using type = float;
  static MT_INLINE float load(const float* p, int64_t i) { return p[i]; }
  static MT_INLINE void store(float* p, int64_t i, float value) { p[i] = value; }
  static MT_INLINE float round(float value) { return value; }
};
struct BF16 {
  using type = uint16_t;
  static MT_INLINE float load(const uint16_t* p, int64_t i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); }
  // nearest, ties to even, as torch rounds; NaN stays NaN
  static MT_INLINE uint32_t high(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? ((bits >> 16) | 0x40u) : rounded;
  }
  static MT_INLINE void store(uint16_t* p, int64_t i, float value) { p[i] = static_cast<uint16_t>(high(value)); }
  static MT_INLINE float round(float value) { return from_bits(high(value) << 16); }
};

enum Master { FP32 = 0, SPLIT = 1, PLAIN_BF16 = 2 };

template <int MASTER>
MT_INLINE float load_weight(const void* weight, const int16_t* trail, int64_t i) {
  if (MASTER == FP32) return static_cast<const float*>(weight)[i];
  const uint32_t high = static_cast<uint32_t>(static_cast<const uint16_t*>(weight)[i]) << 16;
  if (MASTER == PLAIN_BF16) return from_bits(high);
  return from_bits(high + static_cast<uint32_t>(static_cast<int32_t>(trail[i])));
}

template <int MASTER>
MT_INLINE void store_weight(void* weight, int16_t* trail, int64_t i, float value) {
  if (MASTER == FP32) {
    static_cast<float*>(weight)[i] = value;
  } else if (MASTER == PLAIN_BF16) {
    BF16::store(static_cast<uint16_t*>(weight), i, value);
  } else {
    // Ties away from zero: the remainder then always fits 16 bits. A NaN keeps its upper half with the quiet bit set.
    const uint32_t bits = to_bits(value);
    const uint32_t high = value != value ? ((bits >> 16) | 0x40u) : ((bits + 0x8000u) >> 16);
    const uint32_t rest = value != value ? 0u : bits - (high << 16);
    static_cast<uint16_t*>(weight)[i] = static_cast<uint16_t>(high);
    trail[i] = static_cast<int16_t>(rest);
  }
}

// How far ahead each stream is fetched: the divisions and the root fill the reorder window before the hardware's own
// prefetcher has all streams under way (interleaved on one machine: 0.68 of the memory's rate without, 0.98 with; half or twice as far is slower).
constexpr int64_t kBlock = 64, kAhead = 256;  // elements

template <class T>
MT_INLINE void fetch(const T* p, int64_t i) {
  for (size_t byte = 0; byte < kBlock * sizeof(T); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(p + i) + byte, 1, 3);
}

template <int MASTER, class GRAD, class MOMENT>
MT_INLINE void adam_block(const MtSegment& s, int64_t begin, int64_t end) {
  void* __restrict weight = s.weight;
  int16_t* __restrict trail = s.trail;
  const auto* __restrict grad = static_cast<const typename GRAD::type*>(s.grad);
  auto* __restrict exp_avg = static_cast<typename MOMENT::type*>(s.exp_avg);
  auto* __restrict exp_avg_sq = static_cast<typename MOMENT::type*>(s.exp_avg_sq);
  const float decay = s.decay, l2 = s.l2, w1 = s.one_minus_beta1, beta2 = s.beta2, w2 = s.one_minus_beta2;
  const float step = s.minus_step_size, root = s.correction2_sqrt, eps = s.eps;
  const bool near = std::fabs(w1) < 0.5f;  // torch's lerp takes the nearer end as its base
  const float coefficient = near ? w1 : w1 - 1.0f;
  const float clip = s.clip;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    float p = load_weight<MASTER>(weight, trail, i);
    float g = GRAD::round(GRAD::load(grad, i) * clip);
    g = l2 != 0.0f ? __builtin_fmaf(p, l2, g) : g;
    p = p * decay;
    float m = MOMENT::load(exp_avg, i);
    float v = MOMENT::load(exp_avg_sq, i);
    m = __builtin_fmaf(coefficient, g - m, near ? m : g);
    v = __builtin_fmaf(w2 * g, g, v * beta2);
    p = p + (step * m) / (__builtin_sqrtf(v) / root + eps);
    MOMENT::store(exp_avg, i, m);
    MOMENT::store(exp_avg_sq, i, v);
    store_weight<MASTER>(weight, trail, i, p);
  }
}

template <int MASTER, class GRAD, class SEGMENT>
MT_INLINE void fetch_weight_and_grad(const SEGMENT& s, int64_t ahead) {
  using Weight = typename std::conditional<MASTER == FP32, float, uint16_t>::type;
  fetch(static_cast<const Weight*>(s.weight), ahead);
  if (MASTER == SPLIT) fetch(s.trail, ahead);
  fetch(static_cast<const typename GRAD::type*>(s.grad), ahead);
}

template <int MASTER, class GRAD, class MOMENT>
MT_INLINE void step_range(const MtSegment& s, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    const int64_t ahead = i + kAhead;  // past the end it is a hint that does nothing
    fetch_weight_and_grad<MASTER, GRAD>(s, ahead);
    fetch(static_cast<const typename MOMENT::type*>(s.exp_avg), ahead);
    fetch(static_cast<const typename MOMENT::type*>(s.exp_avg_sq), ahead);
    adam_block<MASTER, GRAD, MOMENT>(s, i, i + kBlock);
  }
  adam_block<MASTER, GRAD, MOMENT>(s, i, end);
}

template <int MASTER, class GRAD, class MOMENT, bool MOMENTUM>
MT_INLINE void sgd_block(const MtSgdSegment& s, int64_t begin, int64_t end) {
  void* __restrict weight = s.weight;
  int16_t* __restrict trail = s.trail;
  const auto* __restrict grad = static_cast<const typename GRAD::type*>(s.grad);
  auto* __restrict momentum = static_cast<typename MOMENT::type*>(s.momentum);
  const float weight_decay = s.weight_decay, mu = s.mu, fresh = s.one_minus_dampening, minus_lr = s.minus_lr, clip = s.clip;
  const bool first = s.first != 0, nesterov = s.nesterov != 0;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const float p = load_weight<MASTER>(weight, trail, i);
    float g = GRAD::round(GRAD::load(grad, i) * clip);
    g = weight_decay != 0.0f ? __builtin_fmaf(p, weight_decay, g) : g;
    if (MOMENTUM) {
      const float old = MOMENT::load(momentum, i);
      const float m = first ? g : __builtin_fmaf(g, fresh, old * mu);
      MOMENT::store(momentum, i, m);
      g = nesterov ? __builtin_fmaf(m, mu, g) : m;
    }
    store_weight<MASTER>(weight, trail, i, __builtin_fmaf(g, minus_lr, p));
  }
}

template <int MASTER, class GRAD, class MOMENT, bool MOMENTUM>
MT_INLINE void sgd_range(const MtSgdSegment& s, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    fetch_weight_and_grad<MASTER, GRAD>(s, i + kAhead);
    if (MOMENTUM) fetch(static_cast<const typename MOMENT::type*>(s.momentum), i + kAhead);
    sgd_block<MASTER, GRAD, MOMENT, MOMENTUM>(s, i, i + kBlock);
  }
  sgd_block<MASTER, GRAD, MOMENT, MOMENTUM>(s, i, end);
}

template <int MASTER, class GRAD, class MOMENT>
MT_INLINE void step_range(const MtSgdSegment& s, int64_t begin, int64_t end) {
  if (s.momentum != nullptr) {
    sgd_range<MASTER, GRAD, MOMENT, true>(s, begin, end);
  } else {
    sgd_range<MASTER, GRAD, MOMENT, false>(s, begin, end);
  }
}

template <class SEGMENT>
using Range = void (*)(const SEGMENT&, int64_t, int64_t);

#define MT_VARIANT(NAME, TARGET, MASTER, GRAD, MOMENT)                                                                               \
  TARGET void NAME(const MtSegment& s, int64_t begin, int64_t end) { step_range<MASTER, GRAD, MOMENT>(s, begin, end); }    \
  TARGET void NAME(const MtSgdSegment& s, int64_t begin, int64_t end) { step_range<MASTER, GRAD, MOMENT>(s, begin, end); }
#define MT_TABLE(SEGMENT, NAME, SUFFIX)                                                                                     \
  const Range<SEGMENT> NAME##_##SUFFIX[12] = {fp32_f_f_##SUFFIX,  fp32_f_b_##SUFFIX,  fp32_b_f_##SUFFIX,  fp32_b_b_##SUFFIX,    \
                                              split_f_f_##SUFFIX, split_f_b_##SUFFIX, split_b_f_##SUFFIX, split_b_b_##SUFFIX,   \
                                              plain_f_f_##SUFFIX, plain_f_b_##SUFFIX, plain_b_f_##SUFFIX, plain_b_b_##SUFFIX};
#define MT_ALL(SUFFIX, TARGET)                              \
  MT_VARIANT(fp32_f_f_##SUFFIX, TARGET, FP32, F32, F32)     \
  MT_VARIANT(fp32_f_b_##SUFFIX, TARGET, FP32, F32, BF16)    \
  MT_VARIANT(fp32_b_f_##SUFFIX, TARGET, FP32, BF16, F32)    \
  MT_VARIANT(fp32_b_b_##SUFFIX, TARGET, FP32, BF16, BF16)   \
  MT_VARIANT(split_f_f_##SUFFIX, TARGET, SPLIT, F32, F32)   \
  MT_VARIANT(split_f_b_##SUFFIX, TARGET, SPLIT, F32, BF16)  \
  MT_VARIANT(split_b_f_##SUFFIX, TARGET, SPLIT, BF16, F32)  \
  MT_VARIANT(split_b_b_##SUFFIX, TARGET, SPLIT, BF16, BF16) \
  MT_VARIANT(plain_f_f_##SUFFIX, TARGET, PLAIN_BF16, F32, F32)   \
  MT_VARIANT(plain_f_b_##SUFFIX, TARGET, PLAIN_BF16, F32, BF16)  \
  MT_VARIANT(plain_b_f_##SUFFIX, TARGET, PLAIN_BF16, BF16, F32)  \
  MT_VARIANT(plain_b_b_##SUFFIX, TARGET, PLAIN_BF16, BF16, BF16) \
  MT_TABLE(MtSegment, adam, SUFFIX)                              \
  MT_TABLE(MtSgdSegment, sgd, SUFFIX)

MT_ALL(baseline, )
#ifdef MT_X86
MT_ALL(avx2, __attribute__((target("avx2,fma"))))
MT_ALL(avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

// Threads that sleep between steps: a spinning pool beside torch's own would take its cores.
class Pool {
 public:
  explicit Pool(int threads) : size_(std::max(1, threads)) {
    for (int index = 1; index < size_; ++index) workers_.emplace_back([this, index] { work(index); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  template <class Job>
  void run(const Job& job) {
    std::lock_guard<std::mutex> one_at_a_time(caller_);
    if (size_ == 1) return job(0, 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call_ = [](const void* context, int index, int size) { (*static_cast<const Job*>(context))(index, size); };
      context_ = &job;
      left_ = size_ - 1;
      ++generation_;
    }
    wake_.notify_all();
    job(0, size_);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void work(int index) {
    uint64_t seen = 0;
    for (;;) {
      void (*call)(const void*, int, int);
      const void* context;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        call = call_;
        context = context_;
      }
      call(context, index, size_);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        --left_;
      }
      done_.notify_one();
    }
  }
  const int size_;
  std::vector<std::thread> workers_;
  std::mutex caller_, mutex_;
  std::condition_variable wake_, done_;
  void (*call_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  int left_ = 0;
  uint64_t generation_ = 0;
  bool stop_ = false;
};

constexpr int64_t kGrain = 64;  // elements: whole cache lines of every plane

// Applies `range(segment, begin, end)` to the share of worker `index` of all elements.
template <class Segment>
void share(const Segment* segments, int64_t count, int index, int size, Range<Segment> apply) {
  int64_t total = 0;
  for (int64_t k = 0; k < count; ++k) total += segments[k].count;
  const auto cut = [&](int t) { return t == size ? total : (total / kGrain) * t / size * kGrain; };
  const int64_t first = cut(index), last = cut(index + 1);
  int64_t offset = 0;
  for (int64_t k = 0; k < count && offset < last; ++k) {
    const int64_t begin = std::max<int64_t>(first - offset, 0), end = std::min<int64_t>(last - offset, segments[k].count);
    if (begin < end) apply(segments[k], begin, end);
    offset += segments[k].count;
  }
}

template <class Segment>
int step(void* pool, const Segment* segments, int64_t count, int master, int bf16_grad, int bf16_moments, int width, const Range<Segment>* const (&tables)[3]) {
  if (master < 0 || master > 2 || width < 0 || width > mt_widest()) return 1;
  const Range<Segment> range = tables[width][master * 4 + (bf16_grad ? 2 : 0) + (bf16_moments ? 1 : 0)];
  static_cast<Pool*>(pool)->run([=](int index, int size) { share(segments, count, index, size, range); });
  return 0;
}

#ifdef MT_X86
#define MT_TABLES(NAME) {NAME##_baseline, NAME##_avx2, NAME##_avx512}
#else
#define MT_TABLES(NAME) {NAME##_baseline, NAME##_baseline, NAME##_baseline}
#endif

}  // namespace

extern "C" {

void* mt_pool_create(int threads) { return new Pool(threads); }
void mt_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

// One step of all segments. master: 0 fp32, 1 split, 2 bf16; bf16_grad, bf16_moments: 0 or 1; width as mt_widest. Returns 0, or 1 for an unknown kind.
int mt_adam(void* pool, const MtSegment* segments, int64_t count, int master, int bf16_grad, int bf16_moments, int width) {
  const Range<MtSegment>* const tables[3] = MT_TABLES(adam);
  return step(pool, segments, count, master, bf16_grad, bf16_moments, width, tables);
}
int mt_sgd(void* pool, const MtSgdSegment* segments, int64_t count, int master, int bf16_grad, int bf16_moments, int width) {
  const Range<MtSgdSegment>* const tables[3] = MT_TABLES(sgd);
  return step(pool, segments, count, master, bf16_grad, bf16_moments, width, tables);
}

// In-place read-modify-write of `count` 8-byte words: the rate that a fused step can at best reach.
void mt_read_modify_write(void* pool, uint64_t* words, int64_t count) {
  static_cast<Pool*>(pool)->run([=](int index, int size) {
    const int64_t first = count * index / size, last = count * (index + 1) / size;
    int64_t i = first;
    for (; i + 64 <= last; i += 64) {
      for (int64_t line = 0; line < 64; line += 8) __builtin_prefetch(words + i + 128 + line, 1, 3);
      for (int64_t k = i; k < i + 64; ++k) words[k] += 1;
    }
    for (; i < last; ++i) words[i] += 1;
  });
}
}
