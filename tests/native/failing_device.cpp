// A library for LD_PRELOAD: a Vulkan device that is lost after SUBMITS submissions, or has BYTES of memory.

#include <vulkan/vulkan_core.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<long long>  submits;
std::atomic<long long>  bytes;
PFN_vkQueueSubmit       queue_submit;
PFN_vkAllocateMemory    allocate_memory;

VkResult submit(VkQueue queue, uint32_t n, const VkSubmitInfo * infos, VkFence fence) {
    return submits-- > 0 ? queue_submit(queue, n, infos, fence) : VK_ERROR_DEVICE_LOST;
}

VkResult allocate(VkDevice device, const VkMemoryAllocateInfo * info, const VkAllocationCallbacks * callbacks,
                  VkDeviceMemory * memory) {
    bytes -= (long long) info->allocationSize;
    return bytes >= 0 ? allocate_memory(device, info, callbacks, memory) : VK_ERROR_OUT_OF_DEVICE_MEMORY;
}

// whether `name` is `function`, and `variable` has a limit of it
bool is_limited(const char * name, const char * function, const char * variable, std::atomic<long long> & left) {
    const char * limit = getenv(variable);
    if (!limit || strcmp(name, function) != 0) {
        return false;
    }
    left = atoll(limit);
    return true;
}

}  // namespace

extern "C" PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static const auto real =
        (PFN_vkGetInstanceProcAddr) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
    PFN_vkVoidFunction found = real(instance, name);
    if (is_limited(name, "vkQueueSubmit", "SUBMITS", submits)) {
        queue_submit = (PFN_vkQueueSubmit) found;
        return (PFN_vkVoidFunction) submit;
    }
    if (is_limited(name, "vkAllocateMemory", "BYTES", bytes)) {
        allocate_memory = (PFN_vkAllocateMemory) found;
        return (PFN_vkVoidFunction) allocate;
    }
    return found;
}
