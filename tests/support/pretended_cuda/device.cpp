// A CUDA device without a device, under torch's own dispatcher: tensors are torch.cuda's, kernels
// are those of the CPU, and what a device does late is done late.
//
// What it is for: code that runs on it meets everything that tells a device from a CPU but speed.
//   - A tensor on it cannot be mixed with one on the CPU or on another device.
//   - Copies between it and pinned memory happen when something waits for them, not before.
//   - Backward runs in autograd's thread of the device, on the streams autograd chooses.
//   - Every range of memory keeps who used it last: two streams that use it, one of them writing,
//     with no event between them, are a violation; so is memory given back while another stream
//     may still use it.
//   - Memory begins, and ends, as NaN.
//   - What makes the host wait for the device is counted, and refused when told so.
//
// Kernels run when they are launched, after what was launched on their stream; the books, not the
// data, tell where an order is missing between kernels of two streams.
//
// Kernels take no time of the device but for `_sleep`, during which the host goes on. Copies take
// time where `pretended_link` gave the link to the host a rate: one at a time each way.
//
// One clock of the host for all its threads: what one of them has seen the end of, no thread that
// launches later can race with.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

extern "C" {  // Python's
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

using Clock = std::map<int64_t, uint64_t>;  // of each stream: how far
using Time = std::chrono::steady_clock::time_point;

Time now() { return std::chrono::steady_clock::now(); }

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, at] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, at);
  }
}

struct Item {
  uint64_t at;
  std::function<void()> work;
};

struct Stream {
  int64_t id;
  c10::DeviceIndex device;
  Clock clock;
  std::deque<Item> late;
  Time busy = Time::min();  // until then
};

struct Event {
  bool recorded = false;
  int64_t stream = 0;
  uint64_t at = 0;
  Clock clock;
  int asked = 0;
  Time time;
};

struct Use {
  uintptr_t first, last;
  int64_t stream;
  uint64_t at;
  bool writes;
  std::string by;
};

struct Memory {
  size_t nbytes;
  int device;  // -1: pinned, on the host
  int64_t home;
  std::set<int64_t> recorded;
  std::vector<Use> uses;
};

constexpr size_t PAGE = 4096;
constexpr size_t KEPT = size_t{1} << 28;  // bytes given back that nobody gets for a while

struct World {
  std::recursive_mutex mutex;
  std::map<int64_t, Stream> streams;
  std::map<uintptr_t, Memory> memories;
  std::deque<std::pair<void*, size_t>> ended;
  size_t ended_bytes = 0;
  Clock seen;  // by the host
  std::vector<std::string> violations;
  std::map<std::string, int64_t> waits;  // of the host for the device, by what
  std::map<int, size_t> held, most;      // bytes, by device
  int64_t pageable = 0;                  // copies that were to be late, and could not
  int64_t events = 0;
  int devices = 1;
  double bytes_per_second = 0, latency_seconds = 0;  // of the link to the host; 0: takes no time
  Time link_free[2] = {};                            // to the host, to a device
};

World& world() {
  static auto* one = new World();  // threads may outlive the end of the process
  return *one;
}

// Who holds it may need Python's lock to count references: nobody waits for it with that in hand.
struct Lock {
  std::recursive_mutex& mutex;
  explicit Lock(std::recursive_mutex& mutex) : mutex(mutex) {
    if (mutex.try_lock()) return;
    void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (thread != nullptr) PyEval_RestoreThread(thread);
  }
  ~Lock() { mutex.unlock(); }
};

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<int, int64_t> current_streams;
thread_local bool inside = false;  // a kernel of ours
std::atomic<int> refuses_waits{0};

struct Inside {
  bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

int64_t default_stream(int device) { return device; }

int64_t current_id(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? default_stream(device) : found->second;
}

Stream& stream_of(int64_t id, int device) {
  auto& all = world().streams;
  auto found = all.find(id);
  if (found == all.end()) found = all.emplace(id, Stream{id, (c10::DeviceIndex)device, {}, {}}).first;
  return found->second;
}

Stream& current_stream(int device) { return stream_of(current_id(device), device); }

void drain(Stream& stream, uint64_t upto) {
  while (!stream.late.empty() && stream.late.front().at <= upto) {
    auto work = std::move(stream.late.front().work);
    stream.late.pop_front();
    work();
  }
}

uint64_t launch(Stream& stream) {
  join(stream.clock, world().seen);
  return ++stream.clock[stream.id];
}

bool known(const Clock& clock, int64_t stream, uint64_t at) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= at;
}

std::map<uintptr_t, Memory>::iterator memory_at(uintptr_t address) {
  auto& all = world().memories;
  auto found = all.upper_bound(address);
  if (found == all.begin()) return all.end();
  --found;
  return address < found->first + std::max<size_t>(found->second.nbytes, 1) ? found : all.end();
}

std::string told(const Use& use) {
  return use.by + " (" + (use.writes ? "writes" : "reads") + ", stream " +
      std::to_string(use.stream) + ")";
}

void use(const void* pointer, size_t nbytes, bool writes, Stream& stream, const std::string& by) {
  auto first = (uintptr_t)pointer;
  auto found = memory_at(first);
  if (found == world().memories.end() || nbytes == 0) return;
  auto& uses = found->second.uses;
  Use mine{first, first + nbytes, stream.id, stream.clock[stream.id], writes, by};
  std::vector<Use> kept;
  for (auto& other : uses) {
    bool apart = other.last <= mine.first || mine.last <= other.first;
    bool before = known(stream.clock, other.stream, other.at);
    if (!apart && !before && (writes || other.writes))
      world().violations.push_back(
          "no event is between " + told(other) + " and " + told(mine) + " of the same memory");
    bool covered = mine.first <= other.first && other.last <= mine.last && before &&
        (writes || (!other.writes && other.stream == stream.id));
    if (!covered) kept.push_back(std::move(other));
  }
  kept.push_back(std::move(mine));
  uses = std::move(kept);
}

void use(const at::Tensor& tensor, bool writes, Stream& stream, const std::string& by) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  size_t last = 0;
  for (auto at : c10::irange(tensor.dim())) last += (tensor.size(at) - 1) * tensor.stride(at);
  use(tensor.const_data_ptr(), (last + 1) * tensor.element_size(), writes, stream, by);
}

void rest_until(Time time) {
  if (time <= now()) return;
  void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  std::this_thread::sleep_until(time);
  if (thread != nullptr) PyEval_RestoreThread(thread);
}

void wait_for(Stream& stream, const std::string& by) {
  TORCH_CHECK(refuses_waits == 0, "called a synchronizing CUDA operation: ", by);
  ++world().waits[by];
  rest_until(stream.busy);
  drain(stream, UINT64_MAX);
  join(world().seen, stream.clock);
}

// --- memory -----------------------------------------------------------------------------------

void give_back(void* pointer) {
  Lock lock(world().mutex);
  auto& all = world().memories;
  auto found = all.find((uintptr_t)pointer);
  if (found == all.end()) return;
  auto& memory = found->second;
  if (memory.device >= 0) {
    auto& home = stream_of(memory.home, memory.device);
    for (const auto& use : memory.uses)
      if (use.stream != memory.home && !memory.recorded.count(use.stream) &&
          !known(home.clock, use.stream, use.at) && !known(world().seen, use.stream, use.at))
        world().violations.push_back("memory was given back while in use by " + told(use));
    world().held[memory.device] -= memory.nbytes;
  }
  // It is NaN from here on, or once the streams that are known to use it have come so far. Others
  // get it later still: what is late in spite of that may write to it.
  auto spoil = [pointer, nbytes = memory.nbytes, device = memory.device] {
    if (device >= 0) std::memset(pointer, 0xFF, nbytes);
  };
  auto left = std::make_shared<size_t>(memory.recorded.size());
  for (auto id : memory.recorded) {
    auto& stream = stream_of(id, memory.device);
    stream.late.push_back({launch(stream), [left, spoil] { if (--*left == 0) spoil(); }});
  }
  if (memory.recorded.empty()) spoil();
  world().ended.emplace_back(pointer, memory.nbytes);
  world().ended_bytes += memory.nbytes;
  all.erase(found);
  if (world().ended_bytes > KEPT)  // torch's allocators, too, give nothing away that is in use
    for (auto& [id, stream] : world().streams) drain(stream, UINT64_MAX);
  while (world().ended_bytes > KEPT && world().ended.size() > 1) {
    auto [old, nbytes] = world().ended.front();
    world().ended.pop_front();
    world().ended_bytes -= nbytes;
    std::free(old);
  }
}

c10::DataPtr give(size_t nbytes, int device) {
  void* pointer = nullptr;
  size_t aligned = device < 0 ? PAGE : 512;  // pinned memory shares no page with other memory
  size_t room = (std::max<size_t>(nbytes, 1) + aligned - 1) / aligned * aligned;
  TORCH_CHECK(posix_memalign(&pointer, aligned, room) == 0, "out of memory");
  std::memset(pointer, 0xFF, nbytes);
  Lock lock(world().mutex);
  auto& memory = world().memories[(uintptr_t)pointer];
  memory = Memory{nbytes, device, current_id(device), {}, {}};
  if (device < 0) return {pointer, pointer, &give_back, at::kCPU};
  // Whoever had it before may still use it, in what was launched on this stream so far.
  auto& home = stream_of(memory.home, device);
  if (auto at = home.clock[home.id]; at > 0)
    memory.uses.push_back({(uintptr_t)pointer, (uintptr_t)pointer + nbytes, home.id, at, true, "its last owner"});
  auto& held = world().held[device];
  held += nbytes;
  world().most[device] = std::max(world().most[device], held);
  return {pointer, pointer, &give_back, c10::Device(at::kCUDA, (c10::DeviceIndex)device)};
}

struct OnDevice final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override { return give(nbytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override { return give(nbytes, -1); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

OnDevice on_device;
Pinned pinned;

bool is_pinned(const void* pointer) {
  Lock lock(world().mutex);
  auto found = memory_at((uintptr_t)pointer);
  return found != world().memories.end() && found->second.device < 0;
}

// --- what torch asks a backend ----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = at::kCUDA;

  c10::DeviceType type() const override { return at::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {at::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return world().devices; }

  c10::Stream named(int64_t id, c10::Device device) const {
    auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(at::kCUDA, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    int index = device.index() < 0 ? current_device : device.index();
    return named(current_id(index), device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    int index = device.index() < 0 ? current_device : device.index();
    return named(default_stream(index), device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(world().mutex);
    int index = device.index() < 0 ? current_device : device.index();
    int64_t id = 100;
    while (world().streams.count(id)) ++id;
    return named(stream_of(id, index).id, {at::kCUDA, (c10::DeviceIndex)index});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock(world().mutex);
    if (*event == nullptr) *event = new Event();
    auto& one = *(Event*)*event;
    auto& on = stream_of(stream.id(), stream.device_index());
    join(on.clock, world().seen);
    one = Event{true, on.id, on.clock[on.id], on.clock, 0, std::max(on.busy, now())};
    one.asked = (int)(world().events++ % 3);  // so often it says that it is not over
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    if (event == nullptr || !((Event*)event)->recorded) return;
    auto& one = *(Event*)event;
    auto& on = stream_of(stream.id(), stream.device_index());
    join(on.clock, one.clock);
    if (one.stream == on.id) return;
    on.busy = std::max(on.busy, one.time);
    auto at = launch(on);
    auto& other = stream_of(one.stream, on.device);
    auto upto = one.at;
    on.late.push_back({at, [&other, upto] { drain(other, upto); }});
  }
  bool queryEvent(void* event) const override {
    Lock lock(world().mutex);
    if (event == nullptr || !((Event*)event)->recorded) return true;
    auto& one = *(Event*)event;
    if (now() < one.time) return false;
    if (one.asked > 0) {
      --one.asked;
      return false;
    }
    finish(one);
    return true;
  }
  void finish(const Event& event) const {
    drain(stream_of(event.stream, 0), event.at);
    join(world().seen, event.clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    auto& on = stream_of(stream.id(), stream.device_index());
    if (now() < on.busy) return false;
    if (on.late.empty()) join(world().seen, on.clock);
    bool empty = on.late.empty();
    drain(on, UINT64_MAX);
    return empty;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    wait_for(stream_of(stream.id(), stream.device_index()), "synchronize a stream");
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(world().mutex);
    TORCH_CHECK(refuses_waits == 0, "called a synchronizing CUDA operation: an event");
    ++world().waits["synchronize an event"];
    if (event != nullptr) rest_until(((Event*)event)->time);
    if (event != nullptr && ((Event*)event)->recorded) finish(*(Event*)event);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Lock lock(world().mutex);
    ++world().waits["synchronize a device"];
    for (auto& [id, stream] : world().streams)
      if (stream.device == device) {
        rest_until(stream.busy);
        drain(stream, UINT64_MAX);
        join(world().seen, stream.clock);
      }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    auto found = memory_at((uintptr_t)data.get());
    if (found != world().memories.end()) found->second.recorded.insert(stream.id());
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto taken = ((Event*)second)->time - ((Event*)first)->time;
    return std::chrono::duration<double, std::milli>(taken).count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return world().devices; }
  int getNumGPUs() const override { return world().devices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { ::current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(::current_device, device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

// --- kernels ----------------------------------------------------------------------------------

at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(at::kCUDA, current_device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &on_device, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(at::kCUDA, current_device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &on_device,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Let the link carry so many bytes when the stream comes to it; the stream is busy meanwhile.
void occupy_link(Stream& stream, bool to_device, size_t nbytes) {
  if (world().bytes_per_second <= 0) return;
  auto& free = world().link_free[to_device];
  auto seconds = world().latency_seconds + nbytes / world().bytes_per_second;
  auto taken = std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds));
  free = stream.busy = std::max({now(), stream.busy, free}) + taken;
}

void copy_now(const at::Tensor& target, const at::Tensor& source) {
  Inside guard;
  at::AutoDispatchBelowADInplaceOrView below;
  host_alias(target).copy_(host_alias(source));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (inside) {
    copy_now(self, source);
    return self;
  }
  Lock lock(world().mutex);
  const auto& there = self.is_cuda() ? self : source;
  auto& stream = current_stream(there.device().index());
  if (self.is_cuda() && source.is_cuda()) {
    // Between two devices torch lets each one's stream wait for the other's, before and after.
    auto& other = current_stream(source.device().index());
    drain(other, UINT64_MAX);
    drain(stream, UINT64_MAX);
    join(stream.clock, other.clock);
    launch(stream);
    use(source, false, stream, "copy_");
    use(self, true, stream, "copy_");
    copy_now(self, source);
    join(other.clock, stream.clock);
    return self;
  }
  const auto& host = self.is_cuda() ? source : self;
  bool whole = self.dtype() == source.dtype() && self.is_contiguous() && source.is_contiguous() &&
      self.sizes() == source.sizes();
  bool late = non_blocking && is_pinned(host.const_data_ptr());
  if (non_blocking && !late && host.numel() > 0) ++world().pageable;
  if (!non_blocking) wait_for(stream, self.is_cuda() ? "copy to the device" : "copy to the host");
  auto at = launch(stream);
  use(source, false, stream, "copy");
  use(self, true, stream, "copy");
  occupy_link(stream, self.is_cuda(), self.nbytes());
  if (late && whole) {
    void* to = const_cast<void*>(self.const_data_ptr());
    const void* from = source.const_data_ptr();
    size_t nbytes = self.nbytes();
    stream.late.push_back({at, [to, from, nbytes] { std::memcpy(to, from, nbytes); }});
    return self;
  }
  drain(stream, UINT64_MAX);
  copy_now(self, source);
  if (!non_blocking) {
    rest_until(stream.busy);
    join(world().seen, stream.clock);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto self = target;
  return copy_(self, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  auto self = target;
  return copy_(self, source, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  if (!inside) {
    Lock lock(world().mutex);
    auto& stream = current_stream(self.device().index());
    use(self, false, stream, "item");
    wait_for(stream, "item");
  }
  return at::_local_scalar_dense(host_alias(self));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Lock lock(world().mutex);
  auto found = memory_at((uintptr_t)self.const_data_ptr());
  if (found != world().memories.end()) found->second.recorded.insert(stream.id());
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t nbytes = at::detail::computeStorageNbytesContiguous(
      impl->sizes(), impl->itemsize(), impl->storage_offset());
  c10::DeviceGuard guard(self.device());
  if (impl->storage().nbytes() < nbytes)
    at::native::resize_bytes_cpu(impl->storage().unsafeGetStorageImpl(), nbytes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;  // by the formula
}

// Their results' sizes depend on the data, or they give a truth: the host waits for them.
const std::unordered_set<std::string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave",
};
// Take tensors from the host, too.
const std::unordered_set<std::string> MIXING = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (inside) return at::native::cpu_fallback(op, stack);
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<std::pair<at::Tensor, bool>> tensors;
  for (auto at : c10::irange(arguments.size())) {
    const auto* alias = schema.arguments()[at].alias_info();
    bool writes = alias != nullptr && alias->isWrite();
    const auto& value = arguments[at];
    auto add = [&](const at::Tensor& one) {
      if (one.defined()) tensors.emplace_back(one, writes);
    };
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList()) for (const auto& one : value.toTensorVector()) add(one);
    if (value.isOptionalTensorList())
      for (const auto& one : value.toOptionalTensorVector()) if (one) add(*one);
  }
  std::optional<c10::Device> device;
  for (const auto& [one, writes] : tensors) {
    if (!one.is_cuda()) continue;
    TORCH_CHECK(!device || *device == one.device(), name, ": all tensors must be on one device, not on ",
                *device, " and ", one.device());
    device = one.device();
  }
  for (const auto& [one, writes] : tensors)
    TORCH_CHECK(one.is_cuda() || (one.dim() == 0 && !writes) || MIXING.count(name), name,
                ": all tensors must be on one device, not on cpu and ", *device);
  int index = device ? device->index() : current_device;
  {
    Lock lock(world().mutex);
    auto& stream = current_stream(index);
    bool masked = false;  // by truths, whose number is the size of the result
    if (MIXING.count(name))
      for (const auto& value : arguments)
        if (value.isOptionalTensorList())
          for (const auto& one : value.toOptionalTensorVector())
            masked = masked || (one && one->is_cuda() && one->scalar_type() == at::kBool);
    if (WAITING.count(name) || masked) wait_for(stream, name);
    drain(stream, UINT64_MAX);
    launch(stream);
    for (const auto& [one, writes] : tensors)
      if (one.is_cuda()) use(one, writes, stream, name);
  }
  {
    Inside guard;
    c10::DeviceGuard on(c10::Device(at::kCUDA, (c10::DeviceIndex)index));
    at::native::cpu_fallback(op, stack);
  }
  Lock lock(world().mutex);
  auto& stream = current_stream(index);
  for (const auto& value : torch::jit::last(*stack, schema.returns().size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda())
      use(value.toTensor(), true, stream, name);
    if (value.isTensorList())
      for (const auto& one : value.toTensorVector())
        if (one.defined() && one.is_cuda()) use(one, true, stream, name);
  }
}

// Its schema does not say that it writes the running statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool training, double momentum, double epsilon) {
  if (!inside) {
    Lock lock(world().mutex);
    auto& stream = current_stream(input.device().index());
    drain(stream, UINT64_MAX);
    launch(stream);
    use(input, false, stream, "batch_norm");
    for (const auto& one : {mean, variance})
      if (one) use(*one, training, stream, "batch_norm");
  }
  Inside guard;
  auto alias = [](const std::optional<at::Tensor>& one) {
    return one && one->defined() ? std::optional<at::Tensor>(host_alias(*one)) : std::nullopt;
  };
  auto [out, saved_mean, saved_scale] = at::native_batch_norm(
      host_alias(input), alias(weight), alias(bias), alias(mean), alias(variance), training, momentum, epsilon);
  auto device = input.device();
  return {out.to(device), saved_mean.to(device), saved_scale.to(device)};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize_);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("as_strided", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
        offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
  });
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(
        self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
            c10::SymIntArrayRef stride) -> at::Tensor& {
           return at::native::set_storage_cpu_(
               self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
               C10_AS_INTARRAYREF_SLOW(stride));
         });
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    int64_t numel = source.nbytes() / self.element_size();
    return at::native::set_storage_cpu_(self, source, 0, {numel}, {1});
  });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });
}

struct Registered {
  Registered() { c10::SetAllocator(at::kCUDA, &on_device); }
} registered;

}  // namespace

namespace at {
using CUDAHooks = ::Hooks;  // the name torch looks for
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// --- what tests ask ---------------------------------------------------------------------------

extern "C" {

void pretended_devices(int count) { world().devices = count; }
void pretended_link(double bytes_per_second, double latency_seconds) {
  Lock lock(world().mutex);
  world().bytes_per_second = bytes_per_second;
  world().latency_seconds = latency_seconds;
}
int pretended_current_device() { return current_device; }
void pretended_set_device(int device) { current_device = device; }
void pretended_refuse_waits(int refuse) { refuses_waits = refuse; }
int64_t pretended_pageable() { return world().pageable; }
bool pretended_hooked() { return at::detail::getCUDAHooks().hasCUDA(); }

void pretended_synchronize(int device) {
  Lock lock(world().mutex);
  TORCH_CHECK(refuses_waits == 0, "called a synchronizing CUDA operation: synchronize");
  Guard().synchronizeDevice((c10::DeviceIndex)device);
}

// A kernel that somebody else runs now: it takes what was launched before it on its stream.
void pretended_launch(int64_t stream_id, int device) {
  Lock lock(world().mutex);
  auto& stream = stream_of(stream_id, device);
  drain(stream, UINT64_MAX);
  launch(stream);
}

// Milliseconds between two events; a device asks first whether both are past.
double pretended_elapsed(uint64_t first, uint64_t second) {
  Lock lock(world().mutex);
  if (std::max(((Event*)first)->time, ((Event*)second)->time) > now())
    world().violations.push_back("times of events were read that are not past");
  return Guard().elapsedTime((void*)first, (void*)second, 0);
}

// A kernel that takes so long, and uses nothing.
void pretended_sleep(int64_t stream_id, int device, double seconds) {
  Lock lock(world().mutex);
  auto& stream = stream_of(stream_id, device);
  launch(stream);
  auto taken = std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds));
  stream.busy = std::max(stream.busy, now()) + taken;
}

void pretended_use(int64_t stream_id, int device, uint64_t address, uint64_t nbytes, int writes, const char* by) {
  Lock lock(world().mutex);
  use((void*)address, nbytes, writes != 0, stream_of(stream_id, device), by);
}

// Memory of a device that somebody beside it reads or writes now, such as MPI.
void pretended_touch(uint64_t address, uint64_t nbytes, const char* by) {
  Lock lock(world().mutex);
  auto found = memory_at(address);
  if (found == world().memories.end()) return;
  for (const auto& use : found->second.uses)
    if (use.first < address + nbytes && address < use.last &&
        !known(world().seen, use.stream, use.at))
      world().violations.push_back(std::string(by) + " takes memory in use by " + told(use));
}

// A storage of another size, which torch resizes only where it was built for CUDA.
void pretended_resize(uint64_t storage, uint64_t nbytes) {
  auto* impl = (c10::StorageImpl*)storage;
  c10::DeviceGuard guard(impl->device());
  at::native::resize_bytes_cpu(impl, nbytes);
}

// Memory of the host that somebody pinned; the word is CUDA's: 712 where it is pinned already.
int pretended_pin(uint64_t address, uint64_t nbytes) {
  Lock lock(world().mutex);
  for (auto& [at, memory] : world().memories)
    if (at < address + nbytes && address < at + memory.nbytes && memory.device < 0) return 712;
  world().memories[address] = Memory{nbytes, -1, 0, {}, {}};
  return 0;
}

int pretended_unpin(uint64_t address) {
  Lock lock(world().mutex);
  auto found = world().memories.find(address);
  if (found == world().memories.end()) return 713;
  for (const auto& use : found->second.uses)
    if (!known(world().seen, use.stream, use.at))
      world().violations.push_back("memory was unpinned while in use by " + told(use));
  world().memories.erase(found);
  return 0;
}

uint64_t pretended_held(int device, int most) {
  Lock lock(world().mutex);
  return most ? world().most[device] : world().held[device];
}

void pretended_reset_most(int device) {
  Lock lock(world().mutex);
  world().most[device] = world().held[device];
}

// Violations and waits, a line each, since the last call.
int pretended_violations(char* text, int room) {
  Lock lock(world().mutex);
  std::string all;
  for (const auto& one : world().violations) all += one + "\n";
  world().violations.clear();
  snprintf(text, room, "%s", all.c_str());
  return (int)all.size();
}

int pretended_waits(char* text, int room) {
  Lock lock(world().mutex);
  std::string all;
  for (const auto& [by, count] : world().waits) all += by + ": " + std::to_string(count) + "\n";
  world().waits.clear();
  snprintf(text, room, "%s", all.c_str());
  return (int)all.size();
}
}
