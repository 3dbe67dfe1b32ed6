// Steps from several threads, pools that come and go, under ThreadSanitizer: built and run by test_races.py.

#include "kernels.cpp"

int main() {
  const int64_t count = 64 * 500;
  std::vector<std::thread> callers;
  void* shared = mt_pool_create(3);
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([=] {
      std::vector<float> weight(count, 1.0f), grad(count, 0.5f), first(count), second(count);
      std::vector<int16_t> trail(count);
      for (int round = 0; round < 20; ++round) {
        MtSegment adam[2];
        for (int part = 0; part < 2; ++part) {
          const int64_t at = part * (count / 2);
          adam[part] = {&weight[at], &trail[at], &grad[at], &first[at], &second[at], count / 2, 0.99f, 0.0f, 0.1f, 0.999f, 0.001f, -1e-3f, 0.5f, 1e-8f, 1.0f};
        }
        MtSgdSegment sgd = {weight.data(), nullptr, grad.data(), first.data(), count, 0.1f, 0.9f, 1.0f, -1e-3f, 1.0f, round == 0, 0};
        mt_adam(shared, adam, 2, FP32, 0, 0, mt_widest());
        mt_sgd(shared, &sgd, 1, FP32, 0, 0, 0);
        void* own = mt_pool_create(1 + round % 4);
        mt_adam(own, adam, 2, SPLIT, 0, 0, 0);
        mt_read_modify_write(own, reinterpret_cast<uint64_t*>(second.data()), count / 2);
        mt_pool_destroy(own);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  mt_pool_destroy(shared);
  return 0;
}
