// What tests/cost/test_binaries.py compiles: a kernel with nothing, one with shared memory and launch bounds.
__global__ void scale(float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= a;
}

template <int N>
__global__ void __launch_bounds__(256) tile(const float* x, float* y) {
  __shared__ float s[N];
  for (int i = threadIdx.x; i < N; i += blockDim.x) s[i] = x[i];
  __syncthreads();
  float t = 0;
  for (int i = 0; i < N; ++i) t += s[(i * 7 + threadIdx.x) % N];
  y[threadIdx.x] = t;
}
template __global__ void tile<2048>(const float*, float*);
