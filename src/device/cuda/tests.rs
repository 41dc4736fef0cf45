use super::*;

#[test]
fn without_a_driver_or_a_gpu_there_is_a_typed_error() {
    let arena = Arc::new(SharedMap::anonymous(1 << 20).unwrap());
    match CudaDevice::probe(&arena) {
        Ok(device) => assert!(!device.gpus.is_empty()),
        Err(error) => {
            // A driver without a GPU says so when it is initialised (100: no device).
            let absent = matches!(
                error,
                CudaError::NoDriver | CudaError::NoGpu | CudaError::Call { call: "cuInit", .. }
            );
            assert!(absent, "{error}");
            assert!(!error.passes());
        }
    }
}

#[test]
fn a_ring_of_another_kind_or_of_an_unknown_gpu_is_refused() {
    let device = CudaDevice { gpus: Vec::new() };
    let (_map, fd) = SharedMap::create("ring", 1 << 20).unwrap();
    let error = device.open_ring(RingExport::Host { fd, bytes: 1 << 20 });
    assert!(matches!(error.unwrap_err(), DeviceError::Unsupported));
    let export = RingExport::Cuda {
        uuid: [7; 16],
        handle: [0; 64],
        offset: 0,
        bytes: 1 << 20,
    };
    let error = device.open_ring(export).unwrap_err();
    assert!(
        matches!(error, DeviceError::Cuda(CudaError::UnknownGpu(uuid)) if uuid == [7; 16]),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        "this daemon does not see the GPU GPU-07070707-0707-0707-0707-070707070707"
    );
}

#[test]
fn what_may_pass_is_told_from_what_stays() {
    let call = |code| CudaError::Call {
        call: "cuDevicePrimaryCtxRetain",
        code,
        name: String::new(),
    };
    assert!(call(2).passes());
    assert!(!call(101).passes());
    assert!(CudaError::Warming.passes());
    assert!(!CudaError::UnknownGpu([0; 16]).passes());
}
